// The pure parts of the page of a text: how tokens are shown, levels, windows, what is kept where.
import { visible } from "../src/ui/tokenText";
import { excerpt, mostSurprising, lettersAfter } from "../src/text/surprises";
import { expect, test } from "vitest";
import type { Token } from "../src/api";
import { scoreLines } from "../src/text/textExport";
import { readFile } from "../src/text/readFile";
import { beginning, fingerprint, fits, wellFormed } from "../src/text/storedText";
import { legend, level, LEVELS, MEASURES, SCALES } from "../src/text/textMeasures";
import { windowStart, type Scored } from "../src/text/score";
import { spell, textOf } from "../src/text/tokenSpelling";

const token = (bytes: number[], text = ""): Token => ({ id: 0, text, bytes });
const textToken = (text: string): Token => token([...new TextEncoder().encode(text)], text);

test("a character cut into tokens is shown where it begins", () => {
  const [a, b, c] = new TextEncoder().encode("你") as unknown as [number, number, number];
  const tokens = [
    token([], "<bos>"),
    textToken(" a"),
    token([a]),
    token([b]),
    token([c, 33]),
    textToken("\n"),
    textToken("  "),
    token([0xff]),
  ];
  expect(spell(tokens).map(({ shown }) => shown)).toEqual(["<bos>", " a", "你", "⟨BD⟩", "⟨A0⟩!", "↵", "␣␣", "⟨FF⟩"]);
  expect(
    spell(tokens)
      .map(({ own }) => own)
      .join(""),
  ).toBe("<bos> a你!↵␣␣⟨FF⟩");
  expect(spell(tokens).map(({ breaks }) => breaks)).toEqual([0, 0, 0, 0, 0, 1, 0, 0]);
  expect(textOf(tokens.slice(0, 6))).toBe(" a你!\n");
  expect(textOf(tokens.slice(0, 3))).toBeUndefined();
});

test("bidirectional controls and other invisible characters are shown by code point", () => {
  expect(spell([textToken("\u202eab"), textToken("\u0000"), textToken("<b>")]).map(({ shown }) => shown)).toEqual([
    "⟨202E⟩ab",
    "⟨0000⟩",
    "<b>",
  ]);
});

test("what is cut off or overlong is no character", () => {
  const shown = spell([token([0xe4, 0xbd]), token([0xc0, 0x80]), textToken("é")]).map((one) => one.shown);
  expect(shown).toEqual(["⟨E4⟩⟨BD⟩", "⟨C0⟩⟨80⟩", "é"]);
});

test("levels rise with surprise, and the legend names each once", () => {
  for (const measure of MEASURES) {
    const { bounds, falling } = SCALES[measure];
    const rising = [...bounds].sort((a, b) => (falling ? b - a : a - b));
    expect(bounds).toEqual(rising);
    const below = (falling ? 1 : -1) * 1e-9;
    bounds.forEach((bound, at) => {
      expect(level(measure, falling ? bound - 1e-9 : bound)).toBe(at + 1);
      expect(level(measure, falling ? bound : bound + below)).toBe(at);
    });
    expect(new Set(legend(measure)).size).toBe(LEVELS);
  }
  expect(legend("rank")).toEqual(["1", "2–3", "4–10", "11–30", "31–100", "101–1,000", "1,001–10,000", "> 10,000"]);
  expect(legend("bits").slice(-2)).toEqual(["11–15", "≥ 15"]);
  expect(legend("p").at(-1)).toBe("< 0.0001");
  expect(level("bits", Infinity)).toBe(7);
});

test("the window of a token is the one in which it was new", () => {
  for (const [window, stride] of [
    [4, 2],
    [5, 5],
    [6, 1],
    [1, 1],
  ] as const) {
    // As lmhead.analysis.score.windows cuts: the k-th window reads from k·stride, and scores what is new.
    let done = 0;
    for (let start = 0; done < 40; start += stride)
      for (; done < start + window; done++) expect(windowStart(done + 1, { window, stride })).toBe(start);
  }
});

test("short texts fit the address, long ones have a fingerprint", () => {
  expect(fits("a".repeat(3000))).toBe(true);
  expect(fits("你".repeat(400))).toBe(false);
  const texts = ["", "a", "b", "ab", "ba", "a".repeat(1000), "a".repeat(1001)];
  expect(new Set(texts.map(fingerprint)).size).toBe(texts.length);
  expect(wellFormed("a\ud800b\udc00😀")).toBe("a\ufffdb\ufffd😀");
  expect(beginning(`${"one ".repeat(50)}end`, 0.991)).toBe("one ".repeat(49) + "one");
  expect(beginning("onetwothree", 0.6)).toBe("onetwo");
  expect(beginning("😀".repeat(10), 0.55)).toBe("😀".repeat(5));
});

test("a file is text in UTF-8, or nothing", async () => {
  const read = (bytes: BlobPart): ReturnType<typeof readFile> => readFile(new File([bytes], "x"));
  expect(await read("a\r\n你")).toEqual({ text: "a\r\n你" });
  expect(await read("\ufeffa")).toEqual({ text: "\ufeffa" });
  expect(await read(Uint8Array.from([0xe9]))).toEqual({ problem: "notText" });
  expect(await read("a\0")).toEqual({ problem: "notText" });
  expect(await read("a".repeat((512 << 10) + 1))).toEqual({ problem: "large" });
});

test("the most surprising come first, the earlier of equals before the later", () => {
  const tokens = [2, 5, null, 5, 1].map((bits, at) => ({ bits, rank: 1, position: at + 1 }) as Scored);
  expect(mostSurprising(tokens, 4).map(({ position }) => position)).toEqual([3, 2, 4, 1]);
});

test("lines for a text, a long text and a file", () => {
  expect(scoreLines("tiny", "-a'b", "", "").command).toBe("lmhead score tiny --text='-a'\\''b'");
  expect(scoreLines("tiny", "a".repeat(200_000), "", "").command).toMatch(
    /^printf %s a+ \| lmhead score tiny --tokens -$/,
  );
  expect(scoreLines("tiny", "a\0", "", "").command).toBeUndefined();
  const { command, python, note } = scoreLines("tiny", "x", "-my book.txt", "beside it");
  expect(command).toBe("lmhead score tiny --tokens './-my book.txt'");
  expect(python).toContain('Path("-my book.txt").read_bytes()');
  expect(note).toBe("beside it");
});

test("surprises leave out what is no surprise, and excerpts have whole words", () => {
  expect(lettersAfter(" creat", "ed the heaven")).toBe("ed");
  expect(lettersAfter(" don", "’t")).toBe("’t");
  expect(lettersAfter("几时", "有，把酒")).toBe("");
  expect(lettersAfter(",", "and")).toBe("");
  expect(excerpt("once upon a time there was", 12)).toBe("there was");
  expect(excerpt("short", 12)).toBe("short");
  expect(visible("👩‍🚀🇩🇪👍🏽 a")).toBe("👩‍🚀🇩🇪👍🏽␣a");
  expect(visible("\u200d")).toBe("⟨200D⟩");
});
