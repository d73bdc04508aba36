// Bytes as text, strictly: what is no UTF-8 is no text.

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** The text, or undefined. */
export function decoded(bytes: readonly number[]): string | undefined {
  try {
    return strict.decode(Uint8Array.from(bytes));
  } catch {
    return undefined;
  }
}

/** How many bytes a character has that begins with this one. */
export function lengthOf(byte: number): number {
  return byte < 0x80 ? 1 : byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2;
}
