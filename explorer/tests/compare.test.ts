// Two distributions side by side against plain arithmetic, and the places of a text.
import { expect, test } from "vitest";
import { legendOf, measuresOf, maxOf, parted, shareOf, shown, valueOf } from "../src/compare/compareMeasures";
import { distribution, massOf, pair, shownTokens } from "../src/compare/divergence";
import { INITIAL, libraryOptions, swapped } from "../src/compare/sides";
import type { Place } from "../src/compare/useCompare";
import { uniform } from "../src/math/philox";
import { entropy, softmax } from "../src/math/softmax";
import { activeStages, NEUTRAL, ORDERS, type Options, type OrderName } from "../src/sampler/options";
import { processed } from "../src/sampler/process";
import { Row } from "../src/sampler/row";
import type { SamplerState } from "../src/sampler/useSampler";
import { expectClose } from "./golden";

const logits = (seed: number, size = 400): Float32Array =>
  Float32Array.from({ length: size }, (_, id) => 9 * uniform(seed, 0, id) ** 2);
const sampler = (given: Partial<Options>, order: OrderName = "hf"): SamplerState => {
  const options = { ...NEUTRAL, ...given };
  return {
    options,
    order: ORDERS[order],
    orderName: order,
    stages: activeStages(options, ORDERS[order]),
  } as unknown as SamplerState;
};
const NARROW = { temperature: 0.7, top_k: 30, top_p: 0.9, min_p: 0.02 };
const [plain, narrow] = [sampler({}), sampler(NARROW)];

test("divergence, variation and entropies of two models", () => {
  const [y, z] = [logits(1), logits(2)];
  const [p, q] = [softmax([...y]), softmax([...z])];
  const [a, b] = [distribution(new Row(y)), distribution(new Row(z))];
  expectClose([...a], p);
  const both = pair(a, b);
  const kl = p.reduce((sum, x, id) => sum + x * Math.log(x / (q[id] ?? NaN)), 0);
  const apart = p.reduce((sum, x, id) => sum + Math.abs(x - (q[id] ?? NaN)), 0) / 2;
  expectClose(
    [both.kl, both.variation, both.entropyA, both.entropyB],
    [kl, apart, entropy([...y]), entropy([...z])],
    1e-10,
  );
  expect([both.bestA, both.bestB]).toEqual([p.indexOf(Math.max(...p)), q.indexOf(Math.max(...q))]);
  expect(pair(b, a).kl).not.toBeCloseTo(kl, 3);
});

test("what two samplers leave of one row", () => {
  const z = logits(3);
  const row = new Row(z);
  const [a, b] = [distribution(row, narrow), distribution(row, plain)];
  expectClose([...a], [...processed(row, NARROW).probability]);
  expectClose([...b], softmax([...z]));
  expect(pair(a, b).kl).toBeGreaterThan(0.1);
  expect(pair(b, a).kl).toBe(Infinity);
  expect(pair(b, a).variation).toBeCloseTo(pair(a, b).variation, 12);
});

test("a distribution and itself", () => {
  const a = distribution(new Row(logits(4)), narrow);
  expect(pair(a, a)).toMatchObject({ kl: 0, variation: 0 });
});

test("the words shown are the likeliest of either side, or those furthest apart", () => {
  const a = Float64Array.from([0.5, 0.3, 0.1, 0.1, 0]);
  const b = Float64Array.from([0.4, 0, 0.35, 0.1, 0.15]);
  expect(shownTokens(a, b, 3, "most")).toEqual([0, 2, 1]);
  expect(shownTokens(a, b, 3, "apart")).toEqual([1, 2, 4]);
  expect(shownTokens(a, b, 99, "most")).toEqual([0, 2, 1, 4, 3]);
  expect(massOf(a, [0, 2])).toBeCloseTo(0.6, 12);
  const [p, q] = [distribution(new Row(logits(5))), distribution(new Row(logits(6)))];
  const order = [...p.keys()].sort((x, y) => Math.max(p[y] ?? 0, q[y] ?? 0) - Math.max(p[x] ?? 0, q[x] ?? 0) || x - y);
  expect(shownTokens(p, q, 50, "most")).toEqual(order.slice(0, 50));
});

test("settings that do nothing are not sent, and both sides can change places", () => {
  expect(libraryOptions(plain)).toEqual({});
  expect(libraryOptions(sampler(NARROW, "llama.cpp"))).toEqual({
    temperature: 0.7,
    top_k: 30,
    top_p: 0.9,
    min_p: 0.02,
    order: "llama.cpp",
  });
  const [a, b] = [sampler(INITIAL.a), sampler(INITIAL.b)];
  expect(swapped(b, a)).toEqual({
    ta: null,
    ka: null,
    pa: null,
    ma: null,
    oa: null,
    tb: null,
    kb: null,
    pb: null,
    mb: null,
    ob: null,
  });
  expect(swapped(a, b)).toMatchObject({ ta: "1", pa: "1", tb: "0.7", pb: "0.9", ka: null });
});

const word = (id: number): { id: number; text: string; bytes: number[]; p: number } => ({
  id,
  text: "x",
  bytes: [120],
  p: 0.5,
});
const place = (kl: number | null, a: number | null, b: number | null, variation: number | null = null): Place => ({
  position: 1,
  token: word(1),
  log_prob_a: a,
  log_prob_b: b,
  kl,
  total_variation: variation,
  best_a: word(1),
  best_b: word(2),
});

test("what the server cannot write is infinite here", () => {
  expect(valueOf(place(null, -1, null), "kl")).toBe(Infinity);
  expect(valueOf(place(0, -1, null), "gain")).toBe(-Infinity);
  expect(valueOf(place(0, null, -1), "gain")).toBe(Infinity);
  expect(valueOf(place(0, null, null), "gain")).toBe(0);
  expect(valueOf(place(0, -3, -1), "gain")).toBe(2);
  expect(valueOf(place(0, -3, -1, 0.25), "variation")).toBe(0.25);
  expect([shown(Infinity, "kl"), shown(-Infinity, "gain"), shown(2, "gain"), shown(0.25, "variation")]).toEqual([
    "∞",
    "−∞",
    "+2.0000",
    "0.2500",
  ]);
});

test("the greatest difference has the full colour, and each side its own", () => {
  const places = [place(0.5, -1, -2), place(2, -4, -1), place(null, -1, null)];
  expect(maxOf(places, "kl")).toBe(2);
  expect(maxOf(places, "gain")).toBe(3);
  expect(maxOf(places, "variation")).toBe(1);
  expect(shareOf(2, 2)).toEqual({ share: 1, tone: "warm" });
  expect(shareOf(-0.5, 2)).toEqual({ share: 0.5, tone: "cool" });
  expect(shareOf(Infinity, 2)).toEqual({ share: 1, tone: "warm" });
  expect(legendOf("gain", 3).map(({ text }) => text)).toEqual(["−3.00", "−0.75", "+0.00", "+0.75", "+3.00"]);
  for (const measure of measuresOf(true)) {
    const shares = legendOf(measure, 3).map(({ share, tone }) => (tone === "cool" ? -share : share));
    expect([...shares].sort((x, y) => x - y)).toEqual(shares);
  }
  expect(measuresOf(false)).not.toContain("variation");
  expect([parted(place(0, 0, 0)), parted({ ...place(0, 0, 0), best_b: word(1) })]).toEqual([true, false]);
});
