const KEY = "multilin key";

/** An error that the server answered, with its message. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The key is kept until the tab is closed. */
export const setKey = key => sessionStorage.setItem(KEY, key);

async function request(method, path, body, signal) {
  const headers = body === undefined ? {} : {"Content-Type": "application/json"}, key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, {method, headers, body: body && JSON.stringify(body), signal});
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(0, "The server does not answer.");
  }
  if (response.ok) return response;
  const content = await response.json().catch(() => null);
  throw new ServerError(response.status, content?.error?.message ?? `The server answered with status ${response.status}.`);
}

export async function call(method, path, body) {
  return (await request(method, path, body)).json();
}

/** The events of a stream. */
export async function* stream(path, body, signal) {
  const response = await request("POST", path, {...body, stream: true}, signal);
  let rest = "";
  for await (const piece of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ServerError(500, event.error.message);
      yield event;
    }
  }
  throw new ServerError(0, "The connection to the server broke.");
}

/** Iterate over a stream, which Safari cannot do itself. */
async function* pieces(readable) {
  const reader = readable.getReader();
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    reader.releaseLock();
  }
}
