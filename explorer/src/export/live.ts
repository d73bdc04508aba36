// The interactive parts of a report: data, and the one script that draws them.
//
// `liveScript` is written into the report as text, so it uses nothing outside itself.

/** Ranked tokens with sliders for temperature, top-k, top-p and min-p, in the order of Hugging Face. */
export interface LiveDistribution {
  readonly kind: "distribution";
  readonly title: string;
  readonly labels: Readonly<
    Record<"temperature" | "top_k" | "top_p" | "min_p" | "token" | "raw" | "processed", string>
  >;
  readonly values: {
    readonly temperature: number;
    readonly top_k: number;
    readonly top_p: number;
    readonly min_p: number;
  };
  /** The best tokens, by rank. */
  readonly tokens: readonly string[];
  /** All logits by rank, as float32 in base64. */
  readonly logits: string;
}

/** Tokens in a line, or a grid of them, colored by one of several measures; the numbers appear under the pointer. */
export interface LiveCells {
  readonly kind: "cells";
  readonly title: string;
  readonly by: string;
  readonly choose: string;
  readonly point: string;
  readonly measures: readonly (readonly [string, string])[];
  /** Heads of the columns; undefined for a line of text. */
  readonly columns?: readonly string[];
  readonly rows: readonly {
    readonly name: string;
    readonly cells: readonly {
      readonly text: string;
      readonly breaks?: number;
      /** For each measure, its value and the strength of its color from 0 to 1. */
      readonly values: readonly (readonly [string, number])[];
    }[];
  }[];
}

export type Live = LiveDistribution | LiveCells;

/** Numbers as base64 of their float32 bytes. */
export function base64(numbers: Float32Array): string {
  const bytes = new Uint8Array(numbers.buffer, numbers.byteOffset, numbers.byteLength);
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}

/** Data as the content of a <script type="application/json">. */
export function dataText(live: Live): string {
  return JSON.stringify(live).replace(
    /[<>&\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** Runs in the report. */
export function liveScript(): void {
  const add = (into: Element, name: string, text = "", attributes: Record<string, string> = {}): HTMLElement => {
    const element = document.createElement(name);
    element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    into.append(element);
    return element;
  };

  const distribution = (box: Element, data: LiveDistribution): void => {
    const bytes = Uint8Array.from(atob(data.logits), (c) => c.charCodeAt(0));
    const z = new Float32Array(bytes.buffer);
    const softmax = (t: number): Float64Array => {
      const p = Float64Array.from(z, (x) => Math.exp((x - (z[0] ?? 0)) / t));
      const total = p.reduce((sum, x) => sum + x, 0);
      return p.map((x) => x / total);
    };
    const raw = softmax(1);
    const now: Record<string, number> = { ...data.values };
    const controls = add(box, "div", "", { class: "live-controls" });
    const limits = { temperature: [0.05, 3, 0.05], top_k: [0, 100, 1], top_p: [0.01, 1, 0.01], min_p: [0, 1, 0.01] };
    for (const [name, [low = 0, high = 1, step = 1]] of Object.entries(limits)) {
      const label = add(controls, "label", `${data.labels[name as keyof typeof limits]} `);
      const slider = add(label, "input", "", { type: "range", name, min: `${low}`, max: `${high}`, step: `${step}` });
      const shown = add(label, "output", String(now[name]));
      (slider as HTMLInputElement).value = String(now[name]);
      slider.addEventListener("input", () => {
        now[name] = Number((slider as HTMLInputElement).value);
        shown.textContent = String(now[name]);
        draw();
      });
    }
    const table = add(box, "table", "", { class: "live-bars" });
    const head = add(add(table, "thead"), "tr");
    for (const name of ["token", "raw", "processed"] as const) add(head, "th", data.labels[name]);
    const body = add(table, "tbody");
    const draw = (): void => {
      const p = softmax(Math.max(now["temperature"] ?? 1, 1e-6));
      let count = now["top_k"] ? Math.min(now["top_k"], p.length) : p.length;
      let mass = 0;
      for (let i = 0; i < count; i++) mass += p[i] ?? 0;
      if ((now["top_p"] ?? 1) < 1) {
        let sum = 0;
        for (let i = 0; i < count; i++) {
          sum += (p[i] ?? 0) / mass;
          if (sum >= (now["top_p"] ?? 1)) count = i + 1;
        }
      }
      while (count > 1 && (p[count - 1] ?? 0) < (now["min_p"] ?? 0) * (p[0] ?? 0)) count--;
      mass = 0;
      for (let i = 0; i < count; i++) mass += p[i] ?? 0;
      body.textContent = "";
      data.tokens.forEach((text, i) => {
        const left = i < count ? (p[i] ?? 0) / mass : 0;
        const row = add(body, "tr", "", { "data-p": String(left) });
        add(row, "th", text, { scope: "row" });
        add(row, "td", (raw[i] ?? 0).toFixed(4), { class: "n" });
        add(row, "td", left ? left.toFixed(4) : "–", { class: "n" });
        const bar = add(add(row, "td", "", { class: "live-bar" }), "i");
        bar.style.width = `${100 * left}%`;
      });
    };
    draw();
  };

  const cells = (box: Element, data: LiveCells): void => {
    const label = add(box, "label", `${data.choose} `);
    const select = add(label, "select") as HTMLSelectElement;
    for (const [name, text] of data.measures) add(select, "option", text, { value: name });
    select.value = data.by;
    const status = add(box, "p", data.point, { class: "live-status", role: "status" });
    const wide = add(box, "div", "", { class: "wide" });
    const made: {
      element: HTMLElement;
      number: HTMLElement | undefined;
      values: readonly (readonly [string, number])[];
    }[] = [];
    const showValues = (name: string, text: string, values: readonly (readonly [string, number])[]): void => {
      const numbers = data.measures.map(([, measure], at) => `${measure} ${values[at]?.[0] ?? ""}`);
      status.textContent = [name, text, ...numbers].filter(Boolean).join(" · ");
    };
    const table = data.columns ? add(wide, "table", "", { class: "live-grid" }) : undefined;
    const head = table && add(add(table, "thead"), "tr");
    if (head) ["", ...(data.columns ?? [])].forEach((text) => add(head, "th", text));
    for (const row of data.rows) {
      const into = table ? add(table, "tr") : add(wide, "p", "", { class: "live-text" });
      if (table) add(into, "th", row.name);
      for (const cell of row.cells) {
        const element = add(into, table ? "td" : "span", cell.text, { class: "live-cell", tabindex: "0" });
        const number = table ? add(element, "small") : undefined;
        for (const event of ["mouseenter", "focus"])
          element.addEventListener(event, () => showValues(row.name, cell.text.trim() || cell.text, cell.values));
        made.push({ element, number, values: cell.values });
        for (let n = 0; n < (cell.breaks ?? 0); n++) add(into, "br");
      }
    }
    const color = (): void => {
      const at = data.measures.findIndex(([name]) => name === select.value);
      for (const { element, number, values } of made) {
        element.style.setProperty("--share", `${(75 * (values[at]?.[1] ?? 0)).toFixed(1)}%`);
        if (number) number.textContent = values[at]?.[0] ?? "";
      }
    };
    select.addEventListener("change", color);
    color();
  };

  document.querySelectorAll('script[type="application/json"]').forEach((source) => {
    const data = JSON.parse(source.textContent ?? "") as Live;
    const section = document.createElement("section");
    source.after(section);
    add(section, "h2", data.title);
    if (data.kind === "distribution") distribution(section, data);
    else cells(section, data);
  });
}
