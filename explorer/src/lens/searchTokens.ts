// Search tokens: the id itself, then equal texts, then texts that start with the query.

const MAX_MATCHES = 8;

export function search(query: string, texts: readonly string[]): number[] {
  const found = new Set<number>();
  if (/^\d+$/.test(query) && Number(query) < texts.length) found.add(Number(query));
  const bare = query.trim();
  const passes: ((text: string) => boolean)[] = [
    (text) => text === query,
    (text) => bare !== "" && text.trim() === bare,
    (text) => bare !== "" && text.trim().startsWith(bare),
  ];
  for (const fits of passes)
    for (let id = 0; id < texts.length && found.size < MAX_MATCHES; id++) if (fits(texts[id] ?? "")) found.add(id);
  return [...found];
}
