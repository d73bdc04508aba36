// Read a text file in the browser.

export const MAX_BYTES = 512 << 10;

export type Problem = "large" | "notText";

export async function readFile(file: File): Promise<{ text: string } | { problem: Problem }> {
  if (file.size > MAX_BYTES) return { problem: "large" };
  try {
    // Keep a byte order mark, as the command line does.
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? { problem: "notText" } : { text };
  } catch {
    return { problem: "notText" };
  }
}
