// Both languages say the same things, with the same blanks, in the words of the glossary.
import { expect, test } from "vitest";
import en from "../src/i18n/en.json";
import glossary from "../src/i18n/glossary.json";
import zh from "../src/i18n/zh.json";

/** Every text with its path: "chain.title" → "Filters". */
function texts(tree: unknown, path = ""): [string, string][] {
  if (typeof tree === "string") return [[path, tree]];
  return Object.entries(tree as object).flatMap(([key, value]) => texts(value, `${path}.${key}`));
}

const blanks = (text: string): string[] => [...text.matchAll(/\{\w+\}/g)].map(String).sort();
const english = new Map(texts(en));
const chinese = new Map(texts(zh));

test("the same keys", () => {
  expect([...chinese.keys()]).toEqual([...english.keys()]);
});

test("no text is empty, and the same blanks and strong words are in both", () => {
  for (const [path, text] of english) {
    const other = chinese.get(path) ?? "";
    expect(text.trim() && other.trim(), path).not.toBe("");
    expect(blanks(other), path).toEqual(blanks(text));
    expect(other.split("**").length, path).toBe(text.split("**").length);
  }
});

test("Chinese text uses Chinese punctuation", () => {
  for (const [path, text] of chinese) expect(text, path).not.toMatch(/[\u4e00-\u9fff]\s*[,;?!"]/);
});

test("where English uses a term of the glossary, Chinese uses its own", () => {
  for (const term of glossary) {
    const uses = [...english].filter(([, text]) =>
      new RegExp(`\\b${term.en}s?\\b`, "i").test(text.replace(/\{\w+\}/g, "")),
    );
    expect(uses.length, `${term.en} is nowhere`).toBeGreaterThan(0);
    for (const [path] of uses)
      expect(chinese.get(path)?.toLowerCase(), `${path}: ${term.en}`).toContain(term.zh.toLowerCase());
  }
});
