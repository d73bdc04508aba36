// Strict UTF-8 decoding.

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** The text of bytes; undefined if they are not valid UTF-8. */
export function decoded(bytes: readonly number[]): string | undefined {
  try {
    return strict.decode(Uint8Array.from(bytes));
  } catch {
    return undefined;
  }
}

/** The length in bytes of a character that starts with this byte. */
export function lengthOf(byte: number): number {
  return byte < 0x80 ? 1 : byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2;
}
