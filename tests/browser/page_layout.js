// What is wrong with how a page is laid out, as a list of sentences. Run in the page, which it doesn't change.
// `boxes`: overlaps, what is cut and what is beyond an edge, too; else colours alone. Boxes are those of letters:
// a line's box without most of its leading.
(boxes => {
  const faults = new Set();
  const wide = document.documentElement.clientWidth;
  const name = e => {
    const id = e.closest("[id]");
    return `${e.tagName.toLowerCase()}${id ? " in #" + id.id : ""}`;
  };
  const words = text => JSON.stringify(text.trim().replace(/\s+/g, " ").slice(0, 60));
  const styles = new Map();
  const style = e => styles.get(e) ?? styles.set(e, getComputedStyle(e)).get(e);
  const ancestors = function* (e) { for (; e instanceof Element; e = e.parentElement) yield e; };
  const memo = of => { const known = new Map(); return e => {
    if (!known.has(e)) known.set(e, of(e)); return known.get(e); }; };
  const floats = memo(e => [...ancestors(e)].some(a => ["fixed", "sticky"].includes(style(a).position)));
  const boxOf = memo(e => e.getBoundingClientRect());

  // the parts of the page through which an element is seen; scrolls: one of them can be scrolled sideways
  const clips = memo(e => {
    const found = { left: -1e9, right: 1e9, top: -1e9, bottom: 1e9, scrollsX: false, hides: null };
    for (let a = e; a instanceof HTMLElement && a !== document.body; a = a.parentElement) {
      const s = style(a);
      if (s.position === "fixed") break;
      const box = boxOf(a);
      if (s.overflowX !== "visible") {
        found.left = Math.max(found.left, box.left);
        found.right = Math.min(found.right, box.right);
        if (["auto", "scroll"].includes(s.overflowX)) found.scrollsX = true;
        else found.hides ??= a;
      }
      if (s.overflowY !== "visible") {
        found.top = Math.max(found.top, box.top);
        found.bottom = Math.min(found.bottom, box.bottom);
        if (!["auto", "scroll"].includes(s.overflowY)) found.hides ??= a;
      }
    }
    return found;
  });

  const texts = [];
  const add = (e, text, box, shrink) => {
    if (box.width < 1 || box.height < 1) return;
    const trim = shrink * box.height;
    texts.push({ e, text, full: box, left: box.left, right: box.right, top: box.top + trim, bottom: box.bottom - trim });
  };
  const shown = memo(e => e.checkVisibility({ visibilityProperty: true, opacityProperty: true }));
  const walker = document.createTreeWalker(document.body ?? document.documentElement, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, e = node.parentElement;
    if (!node.data.trim() || !e || !shown(e) || e.closest("script, style, title, desc, noscript, option")) continue;
    const svg = e.closest("text");
    if (svg) { if (!svg.measured) { svg.measured = true; add(svg, svg.textContent, boxOf(svg), 0.16); } continue; }
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) add(e, node.data, box, 0.22);
  }
  for (const { e } of texts) delete e.measured;

  for (const t of texts) {
    const seen = clips(t.e), s = style(t.e);
    t.seen = { left: Math.max(t.left, seen.left), right: Math.min(t.right, seen.right),
               top: Math.max(t.top, seen.top), bottom: Math.min(t.bottom, seen.bottom) };
    t.visible = t.seen.right - t.seen.left > 1 && t.seen.bottom - t.seen.top > 1;
    if (!boxes || floats(t.e)) continue;
    const over = Math.max(t.right - wide, -t.left);
    if (over > 1 && !seen.scrollsX && t.visible && t.seen.right > 1)
      faults.add(`beyond the edge by ${over.toFixed(0)} px: ${name(t.e)} ${words(t.text)}`);
    if (seen.hides && boxOf(seen.hides).width > 4 && boxOf(seen.hides).height > 4) {
      const told = [...ancestors(t.e)].some(a => a.title || a.getAttribute("aria-label"));
      const cut = Math.max(t.right - seen.right, seen.left - t.left, t.bottom - seen.bottom, seen.top - t.top);
      const ellipsis = told && [...ancestors(t.e)].some(a => style(a).textOverflow === "ellipsis");
      if (cut > 1 && !seen.scrollsX && !ellipsis && (t.visible || !told))
        faults.add(`cut by ${cut.toFixed(0)} px: ${name(t.e)} ${words(t.text)}`);
    }
    const frame = t.e.closest("svg");
    if (frame && !t.e.closest("[aria-hidden=true]")) {
      const f = boxOf(frame.ownerSVGElement ?? frame);
      if (t.left < f.left - 2 || t.right > f.right + 2 || t.bottom > f.bottom + 2 || t.top < f.top - 2)
        faults.add(`outside its picture: ${words(t.text)} in ${name(frame)}`);
    }
  }
  if (boxes && document.documentElement.scrollWidth > innerWidth)
    faults.add(`the page scrolls sideways by ${document.documentElement.scrollWidth - innerWidth} px`);
  for (const e of !boxes ? [] : document.querySelectorAll("img, svg, table, pre, canvas, video, input, button")) {
    if (!shown(e) || floats(e)) continue;
    const box = boxOf(e);
    if (box.width > 1 && box.right > wide + 1 && !clips(e.parentElement ?? e).scrollsX && !clips(e).scrollsX
        && !e.parentElement?.closest("svg"))
      faults.add(`beyond the edge by ${(box.right - wide).toFixed(0)} px: ${name(e)}`);
  }

  // texts upon texts
  const live = texts.filter(t => t.visible && !floats(t.e)).sort((a, b) => a.seen.top - b.seen.top);
  for (let i = 0; boxes && i < live.length; i++) {
    const a = live[i];
    for (let j = i + 1; j < live.length && live[j].seen.top < a.seen.bottom - 1; j++) {
      const b = live[j];
      const x = Math.min(a.seen.right, b.seen.right) - Math.max(a.seen.left, b.seen.left);
      const y = Math.min(a.seen.bottom, b.seen.bottom) - Math.max(a.seen.top, b.seen.top);
      if (x > 1 && y > 1 && a.e !== b.e) faults.add(`${words(a.text)} overlaps ${words(b.text)} by ${x.toFixed(0)} x ${y.toFixed(0)} px in ${name(a.e)}`);
    }
  }

  // lines and marks of a drawing upon its texts
  const grid = style(document.documentElement).getPropertyValue("--grid").trim();
  const rgb = colour => {
    const canvas = rgb.canvas ??= new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const colour = memo(text => rgb(text));
  const same = (a, b) => a.every((part, i) => Math.abs(part - b[i]) < 2);
  const gridColour = grid && colour(grid);
  const SHAPES = "path, line, polyline, polygon, use, rect, circle, ellipse";
  for (const svg of !boxes ? [] : document.querySelectorAll("svg")) {
    if (!shown(svg) || svg.ownerSVGElement) continue;
    const labels = live.filter(t => t.e.closest("svg") === svg);
    if (!labels.length) continue;
    for (const shape of svg.querySelectorAll(SHAPES)) {
      if (shape.closest("defs, clipPath, marker") || !shown(shape)) continue;
      const s = style(shape), box = boxOf(shape);
      const stroked = s.stroke !== "none" && parseFloat(s.strokeWidth) > 0 && s.strokeOpacity > 0;
      if (shape.tagName !== "use" && (!stroked || (gridColour && same(colour(s.stroke), gridColour)))) continue;
      for (const t of labels) {
        const core = { left: t.left + 1, right: t.right - 1, top: t.top + 1, bottom: t.bottom - 1 };
        if (box.right < core.left || box.left > core.right || box.bottom < core.top || box.top > core.bottom) continue;
        if (t.e.parentNode === shape.parentNode && shape.matches("rect")) continue; // a box around its label
        if (touches(shape, box, core, s)) {
          faults.add(`${shape.tagName} runs through ${words(t.text)} in ${name(svg)}`);
        }
      }
    }
  }
  function touches(shape, box, core, s) {
    if (shape.tagName === "use") {
      const x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
      return x > core.left && x < core.right && y > core.top && y < core.bottom;
    }
    const m = shape.getScreenCTM();
    if (!m) return false;
    const scale = Math.hypot(m.a, m.b) || 1, length = shape.getTotalLength();
    const step = Math.max(1.5 / scale, length / 4000);
    for (let at = 0; at <= length; at += step) {
      const p = shape.getPointAtLength(at), x = m.a * p.x + m.c * p.y + m.e, y = m.b * p.x + m.d * p.y + m.f;
      if (x > core.left && x < core.right && y > core.top && y < core.bottom) {
        const cut = shape.closest("[clip-path]");
        if (!cut) return true;
        const id = cut.getAttribute("clip-path").match(/#([^)"']+)/)?.[1];
        const pane = id && document.getElementById(id)?.firstElementChild;
        if (!pane) return true;
        const own = pane.getBBox(), c = cut.getScreenCTM();
        const left = c.a * own.x + c.e, top = c.d * own.y + c.f;
        if (x >= left && x <= left + c.a * own.width && y >= top && y <= top + c.d * own.height) return true;
      }
    }
    return false;
  }

  // contrast
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const upon = (top, below) => [0, 1, 2].map(i => top[3] * top[i] + (1 - top[3]) * below[i]).concat(1);
  const paper = (style(document.documentElement).colorScheme.includes("dark")
    && matchMedia("(prefers-color-scheme: dark)").matches) ? [18, 18, 18, 1] : [255, 255, 255, 1];
  const ground = memo(e => {
    if (!(e instanceof Element)) return paper;
    return upon(colour(style(e).backgroundColor), ground(e.parentElement));
  });
  const shapeUnder = t => {
    const svg = t.e.closest("svg");
    let found = ground(svg);
    const x = (t.left + t.right) / 2, y = (t.top + t.bottom) / 2;
    for (const shape of svg.querySelectorAll("path, rect")) {
      if (t.e.compareDocumentPosition(shape) & Node.DOCUMENT_POSITION_FOLLOWING) break;
      if (shape.closest("defs, clipPath")) continue;
      const s = style(shape), box = boxOf(shape);
      if (s.fill === "none" || x < box.left || x > box.right || y < box.top || y > box.bottom) continue;
      const m = shape.getScreenCTM();
      if (!m || !shape.isPointInFill(new DOMPoint(x, y).matrixTransform(m.inverse()))) continue;
      const [r, g, b, a] = colour(s.fill);
      found = upon([r, g, b, a * s.fillOpacity * s.opacity], found);
    }
    return found;
  };
  for (const t of live) {
    const s = style(t.e), drawn = t.e.closest("svg");
    if (s.fontSize === "0px" || t.e.closest("[disabled], [aria-hidden=true]")) continue;
    const below = drawn ? shapeUnder(t) : ground(t.e);
    let [r, g, b, a] = colour(drawn ? s.fill : s.color);
    for (const e of ancestors(t.e)) a *= style(e).opacity;
    if (a < 0.05) continue;
    const [x, y] = [light(upon([r, g, b, a], below)), light(below)].sort((p, q) => q - p);
    const contrast = (x + 0.05) / (y + 0.05);
    if (contrast < 4.45) faults.add(`contrast ${contrast.toFixed(1)}: ${name(t.e)} ${words(t.text)}`);
  }
  return [...faults];
})
