/** The tree of turns: a turn is drawn below the turn that it continues; only branches are indented. */
export class Tree {
  constructor(element, onSelect) {
    Object.assign(this, {element, onSelect, items: []});
    element.addEventListener("keydown", event => this.#press(event));
  }

  /** Draw the nodes of Texts.forest. The last turn of `path`, if there is one, is selected. */
  draw(forest, path) {
    const hasFocus = this.element.contains(document.activeElement), onPath = new Set(path.map(turn => turn.id));
    this.items = [];
    this.selected = path.at(-1)?.id;
    forest.forEach((node, place) => this.#add(node, {level: 1, depth: 0, place, size: forest.length, kind: "root"}, onPath));
    this.element.replaceChildren(...this.items.map(item => item.element));
    const current = this.items.find(item => item.turn.id === this.selected) ?? this.items[0];
    if (current) current.element.tabIndex = 0;
    if (this.selected) current.element.scrollIntoView({block: "nearest"});
    if (hasFocus) current?.element.focus();
  }

  #add({turn, children}, {level, depth, place, size, kind, parent}, onPath) {
    const element = document.createElement("div"), item = {element, turn, parent};
    const lines = turn.kept ? [line("given", turn.prompt), line("", turn.text)] : [line("", "No longer kept")];
    element.append(...lines.filter(each => each.textContent));
    if (!element.hasChildNodes()) element.append(line("", turn.kind === "import" ? "Imported state" : "(no text)"));
    element.className = `turn ${kind} ${children.length === 1 ? "continued" : ""} ${onPath.has(turn.id) ? "on-path" : ""}`;
    element.style.setProperty("--depth", Math.min(depth, 8));
    const isSelected = turn.id === this.selected;
    const states = {selected: isSelected, level, setsize: size, posinset: place + 1};
    if (children.length) states.expanded = true;
    for (const [name, value] of Object.entries(states)) element.setAttribute(`aria-${name}`, value);
    element.setAttribute("role", "treeitem");
    element.tabIndex = -1;
    element.onclick = () => this.#choose(item);
    this.items.push(item);
    const isFork = children.length > 1, inner = {level: level + 1, size: children.length, parent: item};
    Object.assign(inner, isFork ? {depth: depth + 1, kind: "forks"} : {depth, kind: "follows"});
    children.forEach((child, place) => this.#add(child, {...inner, place}, onPath));
  }

  #choose(item) {
    if (!item) return;
    item.element.focus();
    this.onSelect(item.turn.id);
  }

  #press(event) {
    const {items} = this, index = items.findIndex(item => item.element === document.activeElement), item = items[index];
    if (!item || event.ctrlKey || event.metaKey || event.altKey) return;
    const targets = {
      ArrowDown: () => items[index + 1], ArrowUp: () => items[index - 1], Home: () => items[0], End: () => items.at(-1),
      ArrowLeft: () => item.parent, ArrowRight: () => items.find(other => other.parent === item),
      Enter: () => item, " ": () => item,
    };
    if (!(event.key in targets)) return;
    event.preventDefault();
    this.#choose(targets[event.key]());
  }
}

function line(kind, text) {
  const element = document.createElement("span");
  element.className = kind;
  element.textContent = text.slice(0, 200).replace(/\s+/g, " ").trim();
  return element;
}
