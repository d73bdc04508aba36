// A sorted row against the plain filters and the library's sampler: the same words and numbers.
import { expect, test } from "vitest";
import { kept, run, type Stage } from "../src/math/filters";
import { draw, gumbels, uniform } from "../src/math/philox";
import { entropy, softmax } from "../src/math/softmax";
import { Moved } from "../src/next/moved";
import { Noise } from "../src/next/noise";
import { Order } from "../src/next/order";
import { Row, type Settings } from "../src/next/row";
import { expectClose, golden } from "./golden";

function logits(size: number, seed: number): Float32Array {
  return Float32Array.from({ length: size }, (_, id) => 12 * uniform(seed, 0, id) ** 3 - (id % 7 ? 0 : 2));
}

const SETTINGS: Settings[] = [
  {},
  { temperature: 0.5, topP: 0.8 },
  { temperature: 0.5, topP: 0.8, order: "llama.cpp" },
  { temperature: 2, topK: 40, topP: 0.95, minP: 0.3 },
  { temperature: 2, topK: 40, topP: 0.95, minP: 0.3, typicalP: 0.7, order: "llama.cpp" },
  { temperature: 0.1, topK: 1, topP: 0.01, minP: 1 },
  { typicalP: 0.01 },
  { typicalP: 0.95, temperature: 3 },
];

function stages({ temperature = 1, topK = 0, topP = 1, minP = 0, typicalP = 1, order = "hf" }: Settings, size: number): Stage[] {
  const warm: Stage = { name: "temperature", value: temperature };
  const [k, p, m, t] = [
    { name: "top_k", value: topK || size },
    { name: "top_p", value: topP },
    { name: "min_p", value: minP },
    { name: "typical_p", value: typicalP },
  ] as const;
  return order === "hf" ? [warm, k, p, m, t] : [k, t, p, m, warm];
}

/** Ids that are left, best first. */
function left(row: Row, processed: ReturnType<Row["process"]>): number[] {
  return processed.best(row.ids.length).map((place) => row.ids[place] ?? -1);
}

test("a chain on a sorted row is the chain on the plain one", () => {
  for (const size of [1, 6, 500])
    for (const settings of SETTINGS) {
      const z = logits(size, size);
      const plain = run(stages(settings, size), [...z]).logits;
      const row = new Row(z);
      const processed = row.process(settings);
      expect(left(row, processed)).toEqual(kept(plain));
      const p = softmax(plain);
      expectClose([...row.ids].map((_, place) => processed.p(place)), [...row.ids].map((id) => p[id] ?? NaN));
      expectClose([processed.entropy], [entropy(plain)], 1e-10);
      expect(row.ids[processed.draw(new Noise(gumbels(42, 7, size)))]).toBe(draw(plain, 42, 7));
      expect(processed.cuts.at(-1)?.left ?? size).toBe(processed.words);
    }
});

interface Sampled {
  row: number;
  settings: Record<string, number>;
  order: "hf" | "llama.cpp";
  kept: number[];
  p: number[];
  token: number;
  steps: { stage: string; words: number; mass: number; entropy: number; best: number; best_prob: number }[];
}

const NAMES: Record<string, keyof Settings> = {
  temperature: "temperature",
  top_k: "topK",
  top_p: "topP",
  min_p: "minP",
  typical_p: "typicalP",
  repetition_penalty: "repetition",
  frequency_penalty: "frequency",
  presence_penalty: "presence",
};

test("every stage leaves what the library's sampler leaves, and the draw is its token", () => {
  const rows = golden.sampler_rows.map((one: { logits: number[] }) => new Row(Float32Array.from(one.logits)));
  for (const want of golden.samplers as Sampled[]) {
    const [row, said] = [rows[want.row] as Row, golden.sampler_rows[want.row]];
    const given = Object.entries(want.settings).map(([name, value]) => [NAMES[name] as string, value]);
    const processed = row.process({ ...Object.fromEntries(given), order: want.order }, said);
    const which = JSON.stringify([want.row, want.settings, want.order]);
    expect(left(row, processed).sort((a, b) => a - b), which).toEqual(want.kept);
    expectClose(want.kept.map((id) => processed.p(row.placeOf(id))), want.p, 1e-10);
    const position = said.prompt.length + said.output.length;
    expect(row.ids[processed.draw(new Noise(gumbels(7, position, row.ids.length)))], which).toBe(want.token);
    const [, ...steps] = want.steps;
    expect(processed.cuts.map(({ name, left, best }) => [name, left, best]), which).toEqual(
      steps.map(({ stage, words, best }) => [stage, words, best]),
    );
    const numbers = processed.cuts.flatMap(({ mass, entropy, bestP }) => [mass, entropy, bestP]);
    expectClose(numbers, steps.flatMap((step) => [step.mass, step.entropy, step.best_prob]), 1e-10);
  }
});

test("of words equally typical the lowest ids stay, though others stand nearer in the ranking", () => {
  const z = Float32Array.from([2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0]); // the mean is nearer to 2
  const row = new Row(z);
  const processed = row.process({ typicalP: 0.3 });
  expect(left(row, processed)).toEqual([0, 1]);
  expect([0, 1, 2, 3].map((place) => processed.has(place))).toEqual([true, true, false, false]);
  expect([1, 2].map((place) => processed.cutBy(place))).toEqual([undefined, "typical_p"]);
});

test("a gap in what is left: the cut behind it keeps the best of the rest", () => {
  const z = Float32Array.from([5, 5, 5, 4.9, 4.9, 4.9, 1, 1]);
  const row = new Row(z);
  const want = run(stages({ typicalP: 0.8, topP: 0.6, order: "llama.cpp" }, 8), [...z]).logits;
  const processed = row.process({ typicalP: 0.8, topP: 0.6, order: "llama.cpp" });
  expect(left(row, processed)).toEqual(kept(want));
  const p = softmax(want);
  expectClose([...row.ids].map((_, place) => processed.p(place)), [...row.ids].map((id) => p[id] ?? NaN));
});

test("a penalty moves words of the context alone", () => {
  const row = new Row(logits(50, 3));
  const said = { prompt: [4, 9], output: [9, 11] };
  const first = row.process({ repetition: 1.5 }, said);
  const again = row.process({ repetition: 1.5, topK: 3 }, said);
  expect(first.cuts[0]?.kept.words).toBe(50);
  expect(left(row, again)).toEqual(left(row, first).slice(0, 3));
  const other = row.process({ repetition: 1.5 }, { prompt: [], output: [] });
  expect(left(row, other)).toEqual([...row.ids]);
  expect(row.process({ frequency: 100 }, said).best(50).slice(-2).map((place) => row.ids[place])).toEqual(
    [11, 9], // of Hugging Face's order: what came behind the prompt
  );
});

test("of many words the one is drawn that has the largest sum, whichever list finds it", () => {
  const size = 20_000;
  const row = new Row(logits(size, 9));
  for (const [position, settings] of [{}, { temperature: 3 }, { temperature: 0.1 }, { repetition: 1.8 }, { topK: 50 }, { typicalP: 0.5 }].entries()) {
    const processed = row.process(settings, { prompt: [...row.ids.slice(0, 9)], output: [] });
    const noise = gumbels(3, position, size);
    const sums = Array.from(row.ids, (id, place) => Math.log(processed.p(place)) + (noise[id] ?? NaN));
    expect(processed.draw(new Noise(noise))).toBe(sums.indexOf(Math.max(...sums)));
  }
});

test("an order with words moved is that of the new scores, sorted; its sums are theirs", () => {
  for (const [size, count, spread] of [[1, 1, 1], [7, 7, 1], [40, 3, 1], [300, 60, 1], [300, 5, 400]] as const) {
    const z = logits(size, size + count).map((x) => (x > 1 ? x * spread : x));
    const order = Order.of(z);
    // The best words are among those that move: down, to where others are, up, or not at all.
    const ids = [...order.ids.slice(0, Math.ceil(count / 2)), ...order.ids.slice(-Math.floor(count / 2) || size)];
    const to = (id: number, n: number): number => [-3, z[(id * 7) % size] ?? 0, (z[id] ?? 0) + 2, z[id] ?? 0][n % 4] ?? 0;
    const changes = new Map(ids.map((id, n) => [id, to(id, n)]));
    const moved = new Moved(order, changes);
    const scores = [...z].map((score, id) => changes.get(id) ?? score);
    const want = [...scores.keys()].sort((a, b) => (scores[b] ?? 0) - (scores[a] ?? 0) || a - b);
    expect(want.map((_, place) => moved.id(place))).toEqual(want);
    expect(want.map((_, place) => moved.score(place))).toEqual(want.map((id) => scores[id]));
    expect(want.map((id) => moved.placeOf(id))).toEqual([...want.keys()]);
    const own = softmax([...z]);
    for (const temperature of [0.05, 1, 3]) {
      const sums = moved.at(temperature);
      const p = softmax(scores.map((score) => score / temperature));
      for (const [from, to] of [[0, size], [0, 1], [size >> 2, size >> 1], [size >> 1, size]] as const) {
        const part = want.slice(from, to);
        const sum = (of: readonly number[]): number => part.reduce((all, id) => all + (of[id] ?? NaN), 0);
        expectClose([sums.odds(from, to) / sums.odds(0, size), moved.mass(from, to)], [sum(p), sum(own)], 1e-10);
      }
      const mean = sums.weighted(0, size) / sums.odds(0, size);
      expectClose([Math.log(sums.odds(0, size)) - mean], [entropy(scores.map((score) => score / temperature))], 1e-9);
    }
  }
});

test("words are sorted by logit, then id, whatever their signs", () => {
  const z = Float32Array.from([0, -0, 1e-40, -1e-40, 3, -3, Infinity, -Infinity, 3, -Infinity, 1e30]);
  const want = [...z.keys()].sort((a, b) => (z[b] === z[a] ? 0 : (z[b] ?? 0) > (z[a] ?? 0) ? 1 : -1) || a - b);
  expect([...Order.of(z).ids]).toEqual(want);
});

test("ranks, entropy and mass of the model's own distribution", () => {
  const z = logits(300, 5);
  const row = new Row(z);
  const p = softmax([...z]);
  expectClose([...row.ids].map((_, place) => row.p(place)), [...row.ids].map((id) => p[id] ?? NaN));
  expectClose([row.entropy], [entropy([...z])], 1e-10);
  row.ids.forEach((id, place) => expect(row.placeOf(id)).toBe(place));
  expect(row.placeOf(300)).toBe(-1);
});

test("masked words have probability 0, and are not counted", () => {
  const row = new Row(Float32Array.from([1, -Infinity, 2]));
  expect([...row.ids]).toEqual([2, 0, 1]);
  expect(row.p(2)).toBe(0);
  expect(row.entropy).toBeCloseTo(entropy([1, -Infinity, 2]), 12);
  expect(row.process({ repetition: 2 }, { prompt: [1, 2], output: [] }).words).toBe(2);
});
