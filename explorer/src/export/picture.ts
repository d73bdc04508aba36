// Redraw parts of the page as a self-contained SVG, without style sheets, scripts or fonts.
//
// In:  elements, as the browser has laid them out. Out: one <svg> with all of them below each other.
//
// Boxes become rectangles, stripes a <pattern>, texts <text> at their own baselines and widths, and an
// <svg> is copied with its computed styles as attributes, with the caption of its <figure>, which names
// its lines apart. All text goes in as text nodes.

const SVG = "http://www.w3.org/2000/svg";
const [PADDING, GAP] = [16, 24];
const [LINE, LETTER] = [16, 6.2]; // of the lines below, in pixels
const STYLES = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "stroke-linecap",
  "stroke-linejoin",
  "stroke-opacity",
  "opacity",
  "font-family",
  "font-size",
  "font-style",
  "font-weight",
  "text-anchor",
  "dominant-baseline",
];

/** `about` are lines below the charts: model, prompt, settings, date. */
export function picture(charts: readonly Element[], title: string, about: readonly string[] = []): SVGSVGElement {
  const folded = charts.map(unfold);
  try {
    return drawing(charts, title, about);
  } finally {
    folded.forEach((fold) => fold());
  }
}

/** Expand a scrolling chart while it is measured; returns a function that restores it. */
function unfold(chart: Element): () => void {
  if (!(chart instanceof HTMLElement)) return () => undefined;
  const { scrollLeft, scrollTop, style } = chart;
  const { maxHeight } = style;
  style.maxHeight = "none";
  chart.scrollTo({ left: 0, top: 0, behavior: "instant" });
  return () => {
    style.maxHeight = maxHeight;
    chart.scrollTo({ left: scrollLeft, top: scrollTop, behavior: "instant" });
  };
}

/** The elements to draw for a chart; for an <svg>, also the caption of its figure. */
function parts(chart: Element): readonly Element[] {
  const caption = chart instanceof SVGSVGElement && chart.closest("figure")?.querySelector("figcaption");
  return caption ? [caption, chart] : [chart];
}

function nameOf(chart: Element): string | undefined {
  return chart.getAttribute("aria-label") ?? chart.querySelector("caption")?.textContent ?? undefined;
}

function fullBox(chart: Element): DOMRect {
  const { left, top, width, height } = chart.getBoundingClientRect();
  return new DOMRect(left, top, Math.max(width, chart.scrollWidth), Math.max(height, chart.scrollHeight));
}

function around(boxes: readonly DOMRect[]): DOMRect {
  const [left, top] = [Math.min(...boxes.map((box) => box.left)), Math.min(...boxes.map((box) => box.top))];
  return new DOMRect(
    left,
    top,
    Math.max(...boxes.map((box) => box.right)) - left,
    Math.max(...boxes.map((box) => box.bottom)) - top,
  );
}

function drawing(charts: readonly Element[], title: string, about: readonly string[]): SVGSVGElement {
  const boxes = charts.map((chart) => around(parts(chart).map(fullBox)));
  const width = Math.max(...boxes.map((box) => box.width), 1) + 2 * PADDING;
  const columns = Math.max(24, Math.floor((width - 2 * PADDING) / LETTER));
  const lines = about.flatMap((line) =>
    wrapped(line.replace(/[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "�"), columns),
  );
  const foot = lines.length ? GAP + lines.length * LINE : 0;
  const height = boxes.reduce((sum, box) => sum + box.height + GAP, 2 * PADDING - GAP) + foot;
  const root = make("svg", {
    viewBox: `0 0 ${num(width)} ${num(height)}`,
    width,
    height,
    role: "img",
  }) as SVGSVGElement;
  root.append(named(charts.length === 1 ? (nameOf(charts[0] as Element) ?? title) : title));
  const ground = common(getComputedStyle(document.body).backgroundColor);
  root.append(make("rect", { width, height, fill: ground }));
  let top = PADDING;
  charts.forEach((chart, at) => {
    const box = boxes[at] as DOMRect;
    const group = make("g", { transform: `translate(${num(PADDING - box.left)} ${num(top - box.top)})` });
    root.append(group);
    for (const part of parts(chart)) draw(part, group, "");
    top += box.height + GAP;
  });
  const { color, fontFamily } = getComputedStyle(document.body);
  lines.forEach((line, at) => {
    const y = top + (at + 0.8) * LINE - GAP / 2;
    const text = make("text", { x: PADDING, y, fill: common(color), "font-family": fontFamily, "font-size": "11px" });
    text.textContent = line;
    root.append(text);
  });
  return root;
}

/** A line in pieces of at most `columns` characters; Chinese ones count twice. */
function wrapped(line: string, columns: number): string[] {
  const found: string[] = [""];
  let used = 0;
  for (const c of line) {
    const wide = c.charCodeAt(0) > 0x2e80 ? 2 : 1;
    if (used + wide > columns) {
      found.push("");
      used = 0;
    }
    found.push((found.pop() ?? "") + c);
    used += wide;
  }
  return found;
}

/** Draw an element and its content. */
function draw(element: Element, into: Element, lines: string): void {
  const style = getComputedStyle(element);
  if (!isDrawn(element, style)) return;
  if (element instanceof SVGSVGElement) return void into.append(copied(element));
  let group = into;
  if (style.opacity !== "1") into.append((group = make("g", { opacity: style.opacity })));
  box(element, style, group);
  if (/hidden|clip/.test(style.overflowX) && element.scrollWidth > element.clientWidth) {
    const { left, top, width, height } = element.getBoundingClientRect();
    const place = { x: left, y: top, width, height, viewBox: [left, top, width, height].map(num).join(" ") };
    group.append((group = make("svg", place)));
  }
  const struck = style.textDecorationLine === "none" ? lines : style.textDecorationLine;
  for (const child of element.childNodes) {
    if (child instanceof Text) text(child, style, struck, group);
    else if (child instanceof Element) draw(child, group, struck);
  }
}

function isDrawn(element: Element, style: CSSStyleDeclaration): boolean {
  if (element instanceof HTMLElement && element.matches(".unseen, input, textarea, select, [data-picture=none]"))
    return false;
  return (
    style.visibility === "visible" &&
    (style.display === "contents" || element.checkVisibility({ contentVisibilityAuto: true }))
  );
}

/** Draw background and borders; an inline element has one box per line. */
function box(element: Element, style: CSSStyleDeclaration, into: Element): void {
  const fill = clear(style.backgroundColor) ? stripes(style.backgroundImage, into) : common(style.backgroundColor);
  const sides = (["Top", "Right", "Bottom", "Left"] as const).map((side) => ({
    width: style[`border${side}Style`] === "none" ? 0 : parseFloat(style[`border${side}Width`]),
    colour: common(style[`border${side}Color`]),
    dashes: style[`border${side}Style`] === "dashed" ? "3 3" : undefined,
  }));
  if (!fill && sides.every(({ width, colour }) => width === 0 || clear(colour))) return;
  for (const { left: x, top: y, width, height, right, bottom } of element.getClientRects()) {
    if (width === 0 || height === 0) continue;
    const rx = Math.min(parseFloat(style.borderTopLeftRadius) || 0, width / 2, height / 2) || undefined;
    const [first] = sides;
    if (first?.width && sides.every((side) => side.width === first.width && side.colour === first.colour)) {
      const inset = first.width / 2;
      const inner = { x: x + inset, y: y + inset, width: width - first.width, height: height - first.width, rx };
      into.append(make("rect", { ...inner, fill: fill ?? "none", stroke: first.colour, "stroke-width": first.width }));
      continue;
    }
    if (fill) into.append(make("rect", { x, y, width, height, rx, fill }));
    const ends = [
      [x, y, right, y],
      [right, y, right, bottom],
      [x, bottom, right, bottom],
      [x, y, x, bottom],
    ] as const;
    sides.forEach(({ width: thick, colour, dashes }, at) => {
      if (!thick || clear(colour)) return;
      const [x1, y1, x2, y2] = ends[at] as readonly [number, number, number, number];
      into.append(make("line", { x1, y1, x2, y2, stroke: colour, "stroke-width": thick, "stroke-dasharray": dashes }));
    });
  }
}

/** A repeating gradient as an SVG pattern, so that bars do not differ by color alone. */
function stripes(gradient: string, into: Element): string | undefined {
  const [, angle, stops] = /^repeating-linear-gradient\((-?[\d.]+)deg, (.*)\)$/.exec(gradient) ?? [];
  if (!angle || !stops) return undefined;
  const ends = new Map<string, number>(); // each colour to where it ends
  for (const [, colour = "", end] of stops.matchAll(/((?:rgba?|color)\([^)]*\)) ([\d.]+)px/g))
    ends.set(common(colour), Number(end));
  // Equal patterns share one id, because pictures of a report are in one document.
  const id = `stripes-${gradient
    .match(/[\w.]+/g)
    ?.slice(1)
    .join("-")}`;
  const root = into.getRootNode() as Element;
  if (!root.querySelector(`[id="${id}"]`)) {
    const long = Math.max(...ends.values());
    const way = `rotate(${num(Number(angle) - 90)})`; // from along the x axis
    const pattern = make("pattern", {
      id,
      width: long,
      height: long,
      patternUnits: "userSpaceOnUse",
      patternTransform: way,
    });
    let x = 0;
    for (const [fill, end] of ends) {
      pattern.append(make("rect", { x, width: end - x, height: long, fill }));
      x = end;
    }
    root.firstElementChild?.after(pattern); // the first is the title
  }
  return `url(#${id})`;
}

function text(node: Text, style: CSSStyleDeclaration, lines: string, into: Element): void {
  const ascent = ascentOf(style);
  for (const { shown, box } of pieces(node)) {
    const line = make("text", {
      x: box.left,
      y: box.top + ascent(box.height),
      textLength: box.width,
      lengthAdjust: "spacingAndGlyphs",
      fill: common(style.color),
      "font-family": style.fontFamily,
      "font-size": style.fontSize,
      "font-weight": style.fontWeight === "400" ? undefined : style.fontWeight,
      "font-style": style.fontStyle === "normal" ? undefined : style.fontStyle,
      "text-decoration": lines || undefined,
      "xml:space": "preserve",
    });
    line.textContent = shown;
    into.append(line);
  }
}

/** The text of a node, line by line. */
function pieces(node: Text): { shown: string; box: DOMRect }[] {
  const text = node.data;
  if (!text.trim()) return [];
  const range = document.createRange();
  range.selectNodeContents(node);
  const boxes = [...range.getClientRects()].filter((box) => box.width > 0);
  if (boxes.length === 1) return [{ shown: collapsed(text), box: boxes[0] as DOMRect }];
  const found: { shown: string; box: DOMRect }[] = [];
  let at = 0;
  for (const c of text) {
    range.setStart(node, at);
    range.setEnd(node, (at += c.length));
    const box = range.getBoundingClientRect();
    if (box.width === 0) continue;
    const last = found.at(-1);
    if (last && Math.abs(last.box.top - box.top) < 2) {
      const left = Math.min(last.box.left, box.left);
      last.box = new DOMRect(left, last.box.top, Math.max(last.box.right, box.right) - left, last.box.height);
      last.shown += c;
    } else found.push({ shown: c, box });
  }
  return found.filter(({ shown }) => shown.trim());
}

function collapsed(shown: string): string {
  return shown.replace(/[\n\r\t]+/g, " ");
}

const fonts = new Map<string, readonly [number, number]>();

/** The distance from the top of a text box to its baseline. */
function ascentOf(style: CSSStyleDeclaration): (height: number) => number {
  const font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  let sizes = fonts.get(font);
  if (!sizes) {
    const context = document.createElement("canvas").getContext("2d") as CanvasRenderingContext2D;
    context.font = font;
    const { fontBoundingBoxAscent: up, fontBoundingBoxDescent: down } = context.measureText("x");
    fonts.set(font, (sizes = [up, down]));
  }
  const [up, down] = sizes;
  return (height) => (height - up - down) / 2 + up;
}

/** A copy of an <svg> with its computed styles as attributes. */
function copied(original: SVGSVGElement): Element {
  const { left, top, width, height } = original.getBoundingClientRect();
  const copy = plain(original);
  for (const [name, value] of Object.entries({ x: left, y: top, width, height })) copy.setAttribute(name, num(value));
  const label = original.getAttribute("aria-label");
  if (label) copy.prepend(named(label));
  return copy;
}

const KEPT = /^(class|style|id|tabindex|role|aria-.*|data-.*|on.*|href|xlink:href)$/i;

function plain(original: Element): Element {
  const copy = make(original.localName, {});
  for (const { name, value } of original.attributes) if (!KEPT.test(name)) copy.setAttribute(name, value);
  const style = getComputedStyle(original);
  for (const name of STYLES) {
    const value = style.getPropertyValue(name);
    if (value) copy.setAttribute(name, common(value));
  }
  for (const child of original.childNodes) {
    if (child instanceof Text) copy.append(child.data);
    else if (child instanceof SVGElement && !/^(script|foreignObject|a|style)$/.test(child.localName))
      copy.append(plain(child));
  }
  return copy;
}

/** A color in rgb(), which all SVG viewers know; browsers return mixed colors as color(srgb 1 0.5 0). */
export function common(colour: string): string {
  const parts = /^color\(srgb ([\d.e-]+) ([\d.e-]+) ([\d.e-]+)(?: \/ ([\d.e-]+))?\)$/.exec(colour);
  if (!parts) return colour;
  const rgb = parts.slice(1, 4).map((part) => Math.round(255 * Math.min(1, Math.max(0, Number(part)))));
  return parts[4] === undefined ? `rgb(${rgb.join(", ")})` : `rgba(${[...rgb, parts[4]].join(", ")})`;
}

function clear(colour: string): boolean {
  return colour === "transparent" || /(,|\/)\s*0\)$/.test(colour);
}

function make(name: string, attributes: Record<string, string | number | undefined>): Element {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes))
    if (value !== undefined) element.setAttribute(key, typeof value === "number" ? num(value) : value);
  return element;
}

function named(title: string): Element {
  return Object.assign(make("title", {}), { textContent: title });
}

function num(x: number): string {
  return String(Math.round(x * 100) / 100);
}
