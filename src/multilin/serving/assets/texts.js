import {call} from "./server.js";

const AT_A_TIME = 20; // sessions whose turns are fetched

/** The turns of sessions as a tree: two sessions that begin with the same turns are branches of one text. */
export class Texts {
  turns = new Map(); // by their ids, as the server describes them
  sessions = new Map(); // {id, changed, ids: of its turns}
  older = []; // sessions whose turns were not fetched yet

  async list() {
    const {data} = await call("GET", "/v1/sessions");
    this.older = data.filter(session => session.num_turns);
    await this.more();
  }

  async more() {
    await Promise.all(this.older.splice(0, AT_A_TIME).map(session => this.fetch(session.id)));
  }

  async fetch(id) {
    return this.put(await call("GET", `/v1/sessions/${id}`));
  }

  put(session) {
    this.sessions.set(session.id, {id: session.id, changed: session.changed, ids: session.turns.map(turn => turn.id)});
    for (const turn of session.turns) this.turns.set(turn.id, turn);
    return this.sessions.get(session.id);
  }

  /** Sessions that end with a turn. */
  endingAt(turn) {
    return [...this.sessions.values()].filter(session => session.ids.at(-1) === turn);
  }

  /** A session that a turn belongs to. */
  withTurn(turn) {
    return [...this.sessions.values()].find(session => session.ids.includes(turn));
  }

  /** A session to continue a turn in: the one that ends there, or else a new one. */
  async openAt(turn) {
    if (!turn) return {session: this.put({turns: [], ...await call("POST", "/v1/sessions", {})}), isNew: true};
    const [session] = this.endingAt(turn);
    if (session) return {session, isNew: false};
    return {session: this.put(await call("POST", `/v1/sessions/${this.withTurn(turn).id}/fork`, {turn})), isNew: true};
  }

  async remove(session) {
    await call("DELETE", `/v1/sessions/${session.id}`);
    this.sessions.delete(session.id);
  }

  previous() {
    const previous = new Map();
    for (const {ids} of this.sessions.values()) ids.slice(1).forEach((id, place) => previous.set(id, ids[place]));
    return previous;
  }

  /** The turns of a text, from the first one to this one. */
  path(turn) {
    const previous = this.previous(), path = [];
    for (let id = turn; id; id = previous.get(id)) path.unshift(this.turns.get(id));
    return path;
  }

  /** Nodes {turn, children}; the text that was changed last comes first. */
  forest() {
    const previous = this.previous(), nodes = new Map(), changed = new Map(), roots = [];
    for (const session of this.sessions.values())
      for (const id of session.ids) changed.set(id, Math.max(changed.get(id) ?? 0, session.changed));
    for (const id of changed.keys()) nodes.set(id, {turn: this.turns.get(id), children: []});
    for (const [id, node] of nodes) (nodes.get(previous.get(id))?.children ?? roots).push(node);
    for (const {children} of nodes.values()) children.sort((a, b) => a.turn.created - b.turn.created);
    return roots.sort((a, b) => changed.get(b.turn.id) - changed.get(a.turn.id));
  }
}
