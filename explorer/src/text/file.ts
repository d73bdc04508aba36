// A file of the reader's, read in the page: its text, or why it is none.

export const MOST_BYTES = 512 << 10;

export type Problem = "large" | "notText";

export async function readFile(file: File): Promise<{ text: string } | { problem: Problem }> {
  if (file.size > MOST_BYTES) return { problem: "large" };
  try {
    // Every byte counts, also a mark of the byte order: the command line reads it so too.
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? { problem: "notText" } : { text };
  } catch {
    return { problem: "notText" };
  }
}
