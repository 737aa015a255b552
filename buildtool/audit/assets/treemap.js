// The treemap: d3-hierarchy lays it out, this draws it as buttons, so that text, focus and themes are the page's.
// A tree is {name, row?, value, children?}; every name in it comes from an image and is only ever set as text.

const HEADER_PX = 18;
const MOST_LEVELS = 8;

/** The names above a row's own place, outermost first. */
function placeOf(row, view, layers) {
  const parts = row.path === "" ? [] : row.path.split("/");
  switch (view) {
    case "layers":
      return [layers[row.layer] ?? `layer ${row.layer}`, ...parts];
    case "owners":
      return [row.group, row.owner === row.group ? "" : row.owner || "smaller packages", ...parts].filter(Boolean);
    case "kinds":
      return [row.kind, row.target, ...parts].filter(Boolean);
    default:
      return parts;
  }
}

function leafName(row) {
  if (row.isFile) return row.target || row.kind;
  return row.target || (row.owner === row.group ? "" : row.owner) || (row.nFiles === 1 ? "1 file" : `${row.nFiles} small files`);
}

/** Rows as a tree. A directory with a single child is told together with it: usr/lib. */
function buildTree(rows, view, layers, rootName) {
  const root = { name: rootName, below: new Map(), leaves: [] };
  for (const row of rows) {
    let node = root;
    for (const name of placeOf(row, view, layers)) {
      if (!node.below.has(name)) node.below.set(name, { name, below: new Map(), leaves: [] });
      node = node.below.get(name);
    }
    const hidden = row.bytes - row.visible;
    if (row.visible) node.leaves.push({ name: leafName(row), row, value: row.visible, hidden: false });
    if (hidden) node.leaves.push({ name: `${leafName(row)} (hidden)`, row, value: hidden, hidden: true });
  }
  return closed(root, true);
}

function closed(node, isRoot) {
  const below = [...node.below.values()].map((child) => closed(child, false));
  const children = [...below, ...node.leaves];
  if (!isRoot && children.length === 1) {
    const only = children[0];
    if (only.children) return { ...only, name: `${node.name}/${only.name}` };
    return { ...only, name: only.row.isFile ? node.name : `${node.name}/ (${only.name})` };
  }
  return { name: node.name, children };
}

function isOpen(node) {
  return Boolean(node.children) && node.depth < MOST_LEVELS && node.x1 - node.x0 > 52 && node.y1 - node.y0 > 44;
}

/** The family with most bytes below a node. */
function mainFamily(node) {
  const sums = new Map();
  for (const leaf of node.leaves()) {
    const { id } = familyOf(leaf.data.row.kind);
    sums.set(id, (sums.get(id) ?? 0) + leaf.value);
  }
  return [...sums].reduce((best, one) => (one[1] > best[1] ? one : best))[0];
}

function label(box, node) {
  const [width, height] = [node.x1 - node.x0, node.y1 - node.y0];
  const name = document.createElement("bdi");
  name.textContent = node.data.name;
  box.append(name);
  if (isOpen(node) ? width < 130 : width < 62 || height <= 32) return;
  const size = document.createElement("small");
  size.textContent = bytesText(node.value);
  box.append(size);
}

class Treemap {
  constructor(page, elements) {
    this.page = page;
    this.map = elements.map;
    this.crumbs = elements.crumbs;
    this.detail = elements.detail;
    this.lit = null; // the family that the legend picks out
    this.show("folders");
    this.map.addEventListener("keydown", (event) => this.key(event));
    this.map.addEventListener("pointerleave", () => this.tell(this.root));
    new ResizeObserver(() => this.draw()).observe(this.map);
  }

  show(view) {
    this.trail = [buildTree(this.page.rows, view, this.page.layerNames, this.page.ref)];
    this.draw();
  }

  light(family) {
    this.lit = this.lit === family ? null : family;
    this.draw();
    return this.lit;
  }

  zoom(node) {
    this.trail.push(...node.ancestors().reverse().slice(1).map((step) => step.data));
    this.moved();
  }

  up(levels) {
    if (this.trail.length === 1) return;
    this.trail.length -= Math.min(levels, this.trail.length - 1);
    this.moved();
  }

  moved() {
    this.draw();
    this.map.querySelector("[tabindex='0']")?.focus({ preventScroll: true });
  }

  draw() {
    const [width, height] = [this.map.clientWidth, this.map.clientHeight];
    if (!width || !height) return;
    this.root = d3
      .hierarchy(this.trail.at(-1))
      .sum((node) => (node.children ? 0 : node.value))
      .sort((a, b) => b.value - a.value);
    d3
      .treemap()
      .size([width, height])
      .round(true)
      .paddingInner(1)
      .paddingOuter((node) => (node.depth && isOpen(node) ? 2 : 0))
      .paddingTop((node) => (node.depth && isOpen(node) ? HEADER_PX : 0))(this.root);
    const boxes = this.boxesIn(this.root);
    if (boxes.length) boxes[0].tabIndex = 0;
    this.map.replaceChildren(...boxes);
    this.drawCrumbs();
    this.tell(this.root);
  }

  boxesIn(parent) {
    const seen = parent.children.filter((node) => node.x1 - node.x0 >= 2 && node.y1 - node.y0 >= 2);
    return seen.flatMap((node) => (isOpen(node) ? [this.box(node), ...this.boxesIn(node)] : [this.box(node)]));
  }

  box(node) {
    const box = document.createElement("button");
    const [width, height] = [node.x1 - node.x0, node.y1 - node.y0];
    box.type = "button";
    box.tabIndex = -1;
    box.dataset.level = node.depth;
    box.className = isOpen(node) ? "box open" : "box leaf";
    Object.assign(box.style, {
      left: `${node.x0}px`,
      top: `${node.y0}px`,
      width: `${width}px`,
      height: `${height}px`,
    });
    if (!isOpen(node)) {
      const family = mainFamily(node);
      box.classList.add(`k-${family}`);
      if (node.data.hidden) box.classList.add("hidden-bytes");
      if (this.lit && this.lit !== family) box.classList.add("dim");
    }
    if (node.depth > 1) box.setAttribute("aria-hidden", "true");
    else box.setAttribute("aria-label", `${node.data.name}, ${this.facts(node)}`);
    if (isOpen(node) || (width > 34 && height > 15)) label(box, node);
    box.addEventListener("click", () => (node.children ? this.zoom(node) : this.tell(node)));
    box.addEventListener("pointerenter", () => this.tell(node));
    box.addEventListener("focus", () => this.tell(node));
    return box;
  }

  path(node) {
    const above = this.trail.slice(1).map((step) => step.name);
    const below = node.ancestors().reverse().slice(1).map((step) => step.data.name);
    return [...above, ...below].join("/") || this.page.ref;
  }

  facts(node) {
    const row = node.data.row;
    const parts = [bytesText(node.value), `${shareText(node.value, this.page.total)} of the image`];
    if (row) {
      parts.push(row.kind + (row.target ? ` for ${row.target}` : ""), row.owner || "several owners", this.page.layerNames[row.layer]);
      if (node.data.hidden) parts.push("replaced or deleted by a later layer, still stored");
    }
    return parts.join(" · ");
  }

  tell(node) {
    const name = document.createElement("bdi");
    name.textContent = this.path(node);
    const facts = document.createElement("span");
    facts.textContent = this.facts(node);
    this.detail.replaceChildren(name, facts);
  }

  drawCrumbs() {
    const items = this.trail.map((tree, n) => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      const name = document.createElement("bdi");
      name.textContent = tree.name;
      button.type = "button";
      button.append(name);
      button.disabled = n === this.trail.length - 1;
      button.addEventListener("click", () => this.up(this.trail.length - 1 - n));
      item.append(button);
      return item;
    });
    this.crumbs.replaceChildren(...items);
  }

  key(event) {
    if (event.key === "Escape" || event.key === "Backspace") {
      event.preventDefault();
      this.up(1);
      return;
    }
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const boxes = [...this.map.querySelectorAll("[data-level='1']")];
    const at = boxes.indexOf(document.activeElement);
    if (!(event.key in steps) || at < 0) return;
    event.preventDefault();
    const next = boxes[(at + steps[event.key] + boxes.length) % boxes.length];
    boxes[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
