// Where a text is kept: a short one in the address, a long one in this tab, under its own fingerprint.
//
// So the back button and a reload bring back either; a link brings back a short one.

const MOST = 3000; // characters of the address
const KEY = "lmhead.text.";

const here = new Map<string, string>();

/** How a text is written in the address. */
export interface Kept {
  readonly text: string | null;
  readonly held: string | null;
}

/** Whether the address has room for a text. */
export function fits(text: string): boolean {
  return encodeURIComponent(text).length <= MOST;
}

export function keep(text: string): Kept {
  if (fits(text)) return { text, held: null };
  const held = fingerprint(text);
  here.set(held, text);
  try {
    sessionStorage.setItem(KEY + held, text);
  } catch {
    // No room, or not allowed: then until the next reload.
  }
  return { text: null, held };
}

/** The long text of a fingerprint; undefined if it was kept elsewhere. */
export function recall(held: string): string | undefined {
  try {
    return here.get(held) ?? sessionStorage.getItem(KEY + held) ?? undefined;
  } catch {
    return here.get(held);
  }
}

/** 64 bits of a text, and its length. */
export function fingerprint(text: string): string {
  let [a, b] = [0x811c9dc5, 0x9e3779b9];
  for (let i = 0; i < text.length; i++) {
    const c = text.charCodeAt(i);
    a = Math.imul(a ^ c, 0x01000193);
    b = Math.imul(b ^ c ^ (a >>> 15), 0x85ebca6b);
  }
  return [a, b, text.length].map((x) => (x >>> 0).toString(36)).join("-");
}

/** Text that has a form in UTF-8: half a character, which a browser's text may hold, has none. */
export function wellFormed(text: string): string {
  return text.replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd");
}

/** The beginning of a text, a share of it, up to the end of a word. */
export function beginning(text: string, share: number): string {
  const end = Math.max(1, Math.floor(text.length * Math.min(share, 1)));
  const cut = text.slice(0, end).replace(/[\ud800-\udbff]$/, ""); // no half of a character
  const space = cut.search(/\s\S*$/);
  return space > 0.9 * end ? cut.slice(0, space) : cut;
}
