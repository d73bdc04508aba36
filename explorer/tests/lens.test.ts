// The numbers of the lens as they are shown and coloured, the keys of its grid, and its search.
import { expect, test } from "vitest";
import { shade } from "../src/heat/color";
import { stepFrom } from "../src/lens/grid";
import {
  brief,
  exact,
  legendOf,
  MEASURES,
  scaleOf,
  shareOf,
  valueOf,
  type Cell,
  type Lens,
} from "../src/lens/lensMeasures";
import { search } from "../src/lens/searchTokens";

const cell = (kl: number): Cell => ({
  best: [{ id: 1, text: "a", bytes: [97], p: 0.5 }],
  entropy: 2,
  target_p: 0.25,
  target_rank: 9,
  kl,
});
const lens: Lens = {
  prompt: [{ id: 1, text: "a", bytes: [97] }],
  targets: [{ id: 2, text: "b", bytes: [98] }],
  layers: [
    { layer: 0, cells: [cell(7.3)] },
    { layer: 1, cells: [cell(0)] },
  ],
  rows: 2,
};
const scale = scaleOf(lens, 1000);

test("the stronger the colour, the nearer to the answer", () => {
  const ends = { p: [0, 1], rank: [999, 0], entropy: [Math.log(1000), 0], kl: [8, 0] };
  for (const measure of MEASURES) {
    const [far, near] = ends[measure] as [number, number];
    expect(shareOf(far, measure, scale), measure).toBeCloseTo(0, 12);
    expect(shareOf(near, measure, scale), measure).toBeCloseTo(1, 12);
    const middle = shareOf((far + near) / 2, measure, scale);
    expect(middle, measure).toBeGreaterThan(0);
    expect(middle, measure).toBeLessThan(1);
  }
});

test("KL has a log scale: a factor of ten is the same step of colour everywhere", () => {
  const [a, b, c] = [0.02, 0.2, 2].map((kl) => shareOf(kl, "kl", scale)) as [number, number, number];
  expect(a - b).toBeCloseTo(b - c, 12);
  expect(legendOf("kl", scale).map(({ text }) => text)).toEqual(["8.00", "1.00", "0.10", "0.01"]);
});

test("a legend goes from far to near, and says what it colours", () => {
  for (const measure of MEASURES) {
    const shares = legendOf(measure, scale).map(({ share }) => share);
    expect(
      [...shares].sort((a, b) => a - b),
      measure,
    ).toEqual(shares);
    expect(shares.at(-1), measure).toBeCloseTo(1, 12);
    expect(new Set(legendOf(measure, scale).map(({ text }) => text)).size).toBe(shares.length);
  }
  expect(legendOf("rank", scale).map(({ text }) => text)).toEqual(["1.0k", "100", "10", "1"]);
});

test("each number of a cell is its own", () => {
  expect(MEASURES.map((measure) => valueOf(cell(3), measure))).toEqual([0.25, 9, 2, 3]);
  expect(scale.maxKl).toBe(8);
});

test("numbers in a cell are short, and ranks begin with 1", () => {
  expect([0, 0.0004, 0.004, 0.0096, 0.25, 1].map((p) => brief(p, "p"))).toEqual([
    "0",
    "<0.1%",
    "0.4%",
    "1%",
    "25%",
    "100%",
  ]);
  expect([0, 998, 1233, 49151, 262143].map((rank) => brief(rank, "rank"))).toEqual(["1", "999", "1.2k", "49k", "262k"]);
  expect(exact(49151, "rank")).toBe("49,152");
  expect([0, 0.25, 1.5e-7].map((p) => exact(p, "p"))).toEqual(["0.000000", "0.250000", "1.500e−7"]);
  expect([brief(1.234, "kl"), brief(12.34, "kl"), exact(1.23456, "entropy")]).toEqual(["1.23", "12.3", "1.2346"]);
});

test("arrows stay inside the grid; Home and End go to its sides, with Ctrl to its corners", () => {
  const size = [4, 9] as const;
  expect(stepFrom([0, 0], "ArrowUp", false, size)).toEqual([0, 0]);
  expect(stepFrom([0, 0], "ArrowLeft", false, size)).toEqual([0, 0]);
  expect(stepFrom([4, 9], "ArrowDown", false, size)).toEqual([4, 9]);
  expect(stepFrom([4, 9], "ArrowRight", false, size)).toEqual([4, 9]);
  expect(stepFrom([2, 3], "ArrowDown", false, size)).toEqual([3, 3]);
  expect(stepFrom([2, 3], "ArrowUp", false, size)).toEqual([1, 3]);
  expect(stepFrom([2, 3], "ArrowRight", false, size)).toEqual([2, 4]);
  expect(stepFrom([2, 3], "ArrowLeft", false, size)).toEqual([2, 2]);
  expect(stepFrom([2, 3], "Home", false, size)).toEqual([2, 0]);
  expect(stepFrom([2, 3], "End", false, size)).toEqual([2, 9]);
  expect(stepFrom([2, 3], "Home", true, size)).toEqual([0, 0]);
  expect(stepFrom([2, 3], "End", true, size)).toEqual([4, 9]);
  expect(stepFrom([2, 3], "a", false, size)).toBeUndefined();
});

test("a shade has no share outside 0 and 1", () => {
  const shares = [-1, 0, 0.61, 0.84, 2, NaN].map((share) => shade(share));
  expect(shares.map(({ style }) => style["--heat"])).toEqual(["0.0%", "0.0%", "61.0%", "84.0%", "100.0%", "0.0%"]);
  expect(shares.map((one) => one.class)).toEqual([
    "heat cool",
    "heat cool",
    "heat cool high",
    "heat cool high deep",
    "heat cool high deep",
    "heat cool",
  ]);
  expect(shade(0.5, "warm").class).toBe("heat warm");
});

test("a word is found by its id, by its text with and without a space, and by its beginning", () => {
  const texts = ["x", " the", "the", "then", "other", "7", " "];
  expect(search("the", texts)).toEqual([2, 1, 3]);
  expect(search(" the", texts)).toEqual([1, 2, 3]);
  expect(search("2", texts)).toEqual([2]);
  expect(search("5", texts)).toEqual([5]);
  expect(search("7", texts)).toEqual([5]);
  expect(search(" ", texts)).toEqual([6]);
  expect(search("no", texts)).toEqual([]);
  expect(
    search(
      "a",
      Array.from({ length: 99 }, (_, i) => `a${i}`),
    ),
  ).toHaveLength(8);
});
