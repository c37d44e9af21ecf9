// Keeps the page's files, so that it works without network after it was loaded once.
const VERSION = "{{version}}"; // of all files: another export at the same address has another version
const LARGE = 2 ** 18; // bytes of a file that is kept when the page loads it, not before

self.addEventListener("install", event => event.waitUntil(keepSmallFiles()));
self.addEventListener("activate", event => event.waitUntil(takeOver()));
self.addEventListener("fetch", event => {
  const url = new URL(event.request.url);
  if (event.request.method === "GET" && url.origin === location.origin) event.respondWith(answer(event));
});

async function keepSmallFiles() {
  const response = await fetch("files.json", {cache: "no-cache"});
  const {version, sizes} = await response.clone().json();
  if (version !== VERSION) throw new Error("the files changed while they were loaded");
  const cache = await caches.open(name());
  await cache.put("files.json", response);
  const small = Object.keys(sizes).filter(path => sizes[path] < LARGE && path !== "sw.js");
  await cache.addAll(["./", ...small].map(path => new Request(path, {cache: "no-cache"})));
}

/** Several exports may lie at one address, in folders: each has a separate cache. */
function name() {
  return `multilin ${registration.scope} ${VERSION}`;
}

async function takeOver() {
  for (const key of await caches.keys())
    if (key.startsWith(`multilin ${registration.scope} `) && key !== name()) await caches.delete(key);
  await clients.claim();
}

async function answer(event) {
  const cache = await caches.open(name());
  const kept = await cache.match(event.request, {ignoreSearch: true});
  if (kept) return kept;
  const response = await fetch(event.request, {cache: "no-cache"});
  if (response.status === 200) event.waitUntil(cache.put(event.request, response.clone()).catch(() => {})); // disk full
  return response;
}
