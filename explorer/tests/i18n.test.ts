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
    for (const mark of ["**", "`"]) expect(other.split(mark).length, path).toBe(text.split(mark).length);
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

test("terms and headings that were agreed on are on the page", () => {
  const agreed: [Map<string, string>, string[]][] = [
    [
      english,
      [
        "Export",
        "Predict",
        "Show layers",
        "Glossary",
        "Reset",
        "target token",
        "Repetition penalty",
        "How predictable is this text?",
      ],
    ],
    [
      chinese,
      [
        "这段文字，模型猜得到吗？",
        "预测概率减去真实标签",
        "把标签中的 ε 平均分给所有词",
        "猜错的代价，以及怎样从中学习",
        "概率太低的词",
        "解决办法",
        "步骤",
        "导出",
        "术语表",
        "开始预测",
        "逐层查看",
        "找不到这样的词元",
        "存在惩罚",
        "每个词元都要对整个词表打分",
        "以 e 为底、平均损失为指数的幂",
      ],
    ],
  ];
  for (const [language, terms] of agreed)
    for (const term of terms)
      expect(
        [...language.values()].some((text) => text.includes(term)),
        term,
      ).toBe(true);
});
