import {call} from "./server.js";

const MOST_NAMED = 4;
const number = value => value.toLocaleString("en", {maximumSignificantDigits: 2});

/** The heat map: every token of a text, coloured by the weight with which the chosen token read it. */
export class ReadingView {
  constructor(sheet, {step, most, meaning}) {
    Object.assign(this, {sheet, step, most, meaning, tokens: null, current: 0});
    step.onchange = () => this.onStep?.();
    sheet.addEventListener("keydown", event => this.#press(event));
  }

  async fetch(session, turn, step) {
    return call("GET", `/v1/sessions/${session}/reading?turn=${turn}&step=${step}`);
  }

  /** Show the weights for a turn. For the same turn the chosen token stays chosen. */
  show(reading) {
    const isSame = this.tokens && this.reading.turn === reading.turn;
    this.reading = reading;
    this.step.replaceChildren(...reading.steps.map((label, index) => new Option(label, index)));
    this.step.value = reading.step;
    this.meaning.textContent = reading.meaning + (reading.num_left_out
      ? ` The first ${reading.num_left_out} tokens are left out: the weights are computed as if the text began after them.` : "");
    this.tokens = reading.characters.map((text, index) => {
      const token = document.createElement("span");
      token.className = index ? "token" : "token mark";
      token.textContent = index ? text : "start";
      token.onclick = () => this.choose(index);
      return token;
    });
    this.sheet.replaceChildren(...this.tokens);
    this.choose(isSame ? this.current : this.tokens.length - 1);
  }

  hide() {
    this.tokens = null;
  }

  choose(index) {
    const weights = this.reading.weights[index], largest = Math.max(...weights.map(Math.abs)) || 1;
    this.tokens[this.current]?.removeAttribute("aria-current");
    this.current = index;
    this.tokens[index].setAttribute("aria-current", "true");
    this.tokens.forEach((token, place) => {
      const weight = weights[place] ?? 0;
      token.style.setProperty("--weight", Math.abs(weight) / largest);
      token.classList.toggle("negative", weight < 0);
      token.classList.toggle("later", place > index);
    });
    this.tokens[index].scrollIntoView({block: "nearest"});
    const order = weights.map((_, place) => place).sort((a, b) => Math.abs(weights[b]) - Math.abs(weights[a]));
    const named = order.slice(0, MOST_NAMED).filter(place => weights[place]);
    const list = named.map(place => `${this.#name(place)} ${number(weights[place])}`).join(", ");
    this.most.textContent = `Largest weights after ${this.#name(index)}: ${list || "none"}`;
  }

  #name(index) {
    return index ? JSON.stringify(this.reading.characters[index]) : "the start";
  }

  #press(event) {
    if (!this.tokens || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.tokens.length - 1;
    const targets = {ArrowLeft: this.current - 1, ArrowRight: this.current + 1, Home: 0, End: last};
    if (!(event.key in targets)) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(targets[event.key], 0), last));
  }
}
