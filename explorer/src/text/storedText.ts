// Store a short text in the address, a long one in the tab's session storage under a hash.
//
// Back button and reload restore both; a link contains only a short text.

const MAX_LENGTH = 3000; // characters of the address
const KEY = "lmhead.text.";

const here = new Map<string, string>();

/** How a text is written in the address. */
export interface Kept {
  readonly text: string | null;
  readonly held: string | null;
}

/** Whether a text fits in the address. */
export function fits(text: string): boolean {
  return encodeURIComponent(text).length <= MAX_LENGTH;
}

export function storeText(text: string): Kept {
  if (fits(text)) return { text, held: null };
  const held = fingerprint(text);
  here.set(held, text);
  try {
    sessionStorage.setItem(KEY + held, text);
  } catch {
    // Storage full or not allowed: keep it until the next reload.
  }
  return { text: null, held };
}

/** The long text of a hash; undefined if another tab stored it. */
export function storedText(held: string): string | undefined {
  try {
    return here.get(held) ?? sessionStorage.getItem(KEY + held) ?? undefined;
  } catch {
    return here.get(held);
  }
}

/** A 64-bit hash of a text, and its length. */
export function fingerprint(text: string): string {
  let [a, b] = [0x811c9dc5, 0x9e3779b9];
  for (let i = 0; i < text.length; i++) {
    const c = text.charCodeAt(i);
    a = Math.imul(a ^ c, 0x01000193);
    b = Math.imul(b ^ c ^ (a >>> 15), 0x85ebca6b);
  }
  return [a, b, text.length].map((x) => (x >>> 0).toString(36)).join("-");
}

/** Replace unpaired surrogates, which UTF-8 cannot encode. */
export function wellFormed(text: string): string {
  return text.replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd");
}

/** The first part of a text, cut at white space. */
export function beginning(text: string, share: number): string {
  const end = Math.max(1, Math.floor(text.length * Math.min(share, 1)));
  const cut = text.slice(0, end).replace(/[\ud800-\udbff]$/, ""); // no half of a character
  const space = cut.search(/\s\S*$/);
  return space > 0.9 * end ? cut.slice(0, space) : cut;
}
