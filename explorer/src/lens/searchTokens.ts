// Search tokens: the id itself, then equal texts, then texts that start with the query.

const MOST = 8;

export function search(sought: string, texts: readonly string[]): number[] {
  const found = new Set<number>();
  if (/^\d+$/.test(sought) && Number(sought) < texts.length) found.add(Number(sought));
  const bare = sought.trim();
  const passes: ((text: string) => boolean)[] = [
    (text) => text === sought,
    (text) => bare !== "" && text.trim() === bare,
    (text) => bare !== "" && text.trim().startsWith(bare),
  ];
  for (const fits of passes)
    for (let id = 0; id < texts.length && found.size < MOST; id++) if (fits(texts[id] ?? "")) found.add(id);
  return [...found];
}
