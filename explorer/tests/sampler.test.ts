// The sampler of the page against `lmhead.Sampler` and the textbook: the same tokens and numbers.
import { expect, test } from "vitest";
import { gumbels, uniform } from "../src/math/philox";
import { entropy, softmax } from "../src/math/softmax";
import { commandOptions, pythonSampler, translated } from "../src/sampler/code";
import {
  activeStages,
  NEUTRAL,
  orderCodec,
  ORDERS,
  problemOf,
  STAGES,
  type Options,
  type StageName,
} from "../src/sampler/options";
import { processed, Processed } from "../src/sampler/process";
import { Row } from "../src/sampler/row";
import { expectClose, golden } from "./golden";

function logits(size: number, seed: number): Float32Array {
  return Float32Array.from({ length: size }, (_, id) => 12 * uniform(seed, 0, id) ** 3 - (id % 7 ? 0 : 2));
}

interface Sampled {
  row: number;
  settings: Partial<Options>;
  order: keyof typeof ORDERS | StageName[];
  kept: number[];
  p: number[];
  token: number;
  steps: { stage: string; words: number; mass: number; entropy: number; best: number; best_prob: number }[];
}

test("every stage leaves what the library's stage leaves, and the draw is the library's token", () => {
  const rows = golden.sampler_rows.map((one: { logits: number[] }) => new Row(Float32Array.from(one.logits)));
  for (const want of [...golden.samplers, ...golden.own_orders] as Sampled[]) {
    const [row, context] = [rows[want.row] as Row, golden.sampler_rows[want.row]];
    const order = typeof want.order === "string" ? ORDERS[want.order] : want.order;
    const counting = want.order === "llama.cpp" ? "llama.cpp" : "hf";
    const found = processed(row, want.settings, order, { ...context, counting, seed: 7 });
    const which = JSON.stringify([want.row, want.settings, want.order]);
    expect(
      found.ids().sort((a, b) => a - b),
      which,
    ).toEqual(want.kept);
    expectClose(
      want.kept.map((id) => found.pOf(id)),
      want.p,
      1e-10,
    );
    const position = context.prompt.length + context.output.length;
    expect(row.ids[found.drawAt(7, position)], which).toBe(want.token);
    const [, ...steps] = want.steps;
    expect(
      found.steps.map(({ name, left, best }) => [name, left, best]),
      which,
    ).toEqual(steps.map(({ stage, words, best }) => [stage, words, best]));
    expectClose(
      found.steps.flatMap(({ mass, entropy, bestP }) => [mass, entropy, bestP]),
      steps.flatMap((step) => [step.mass, step.entropy, step.best_prob]),
      1e-10,
    );
  }
});

test("the orders are the library's", () => {
  expect(ORDERS).toEqual(golden.orders);
  expect(orderCodec.parse("vllm")).toBe(ORDERS.vllm);
  const own = [...STAGES].reverse();
  expect(orderCodec.parse(orderCodec.show(own))).toEqual(own);
  expect(orderCodec.parse("top_k,top_k")).toBeUndefined();
});

test("every filter of the textbook", () => {
  for (const { name, value, z, out } of golden.filters as {
    name: StageName;
    value: number;
    z: number[];
    out: number[];
  }[]) {
    const row = new Row(Float64Array.from(z));
    const found = new Processed(row, [{ name, options: { ...NEUTRAL, [name]: value } }]);
    expectClose([...found.probability], softmax(out));
    expect(found.ids().sort((a, b) => a - b)).toEqual([...out.keys()].filter((id) => out[id] !== -Infinity));
  }
});

test("chains of the textbook: what is left, and each token is removed once", () => {
  for (const { stages, z, out } of golden.chains as {
    stages: [StageName, number][];
    z: number[];
    out: number[];
  }[]) {
    const row = new Row(Float64Array.from(z));
    const found = new Processed(
      row,
      stages.map(([name, value]) => ({ name, options: { ...NEUTRAL, [name]: value } })),
    );
    expectClose([...found.probability], softmax(out));
    expectClose([found.entropy], [entropy(out)], 1e-10);
    const removed = found.steps.reduce((sum, step) => sum + step.removed, 0);
    expect(found.kept + removed).toBe(z.filter((x) => x !== -Infinity).length);
    for (const [rank, id] of row.ids.entries())
      expect(found.removedAt(rank) === undefined).toBe(out[id] !== -Infinity || z[id] === -Infinity);
  }
});

test("of equally typical tokens the lowest ids stay, though others are nearer in the ranking", () => {
  const row = new Row(Float32Array.from([2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0])); // the mean is nearer to 2
  const found = processed(row, { typical_p: 0.3 });
  expect(found.ids()).toEqual([0, 1]);
  expect([1, 2].map((rank) => found.removedAt(rank)?.name)).toEqual([undefined, "typical_p"]);
});

test("a penalty changes tokens of the context only; masked tokens stay masked", () => {
  const row = new Row(logits(50, 3));
  const context = { prompt: [4, 9], output: [9, 11] };
  const first = processed(row, { repetition_penalty: 1.5 }, ORDERS.hf, context);
  const again = processed(row, { repetition_penalty: 1.5, top_k: 3 }, ORDERS.hf, context);
  expect(first.kept).toBe(50);
  expect(again.best(3)).toEqual(first.best(3));
  expect(processed(row, { repetition_penalty: 1.5 }).ids()).toEqual([...row.ids]);
  const counted = processed(row, { frequency_penalty: 100 }, ORDERS.hf, context);
  expect(counted.ids().slice(-2)).toEqual([11, 9]); // Hugging Face counts generated tokens
  const masked = new Row(Float32Array.from([1, -Infinity, 2]));
  expect(processed(masked, { repetition_penalty: 2 }, ORDERS.hf, { prompt: [1, 2], output: [] }).kept).toBe(2);
});

test("edited logits are sorted again, equal ones by id", () => {
  const c = new Row(Float64Array.from([4, 3, 5, 2])).candidates; // by rank: ids 2, 0, 1, 3
  const edits = new Map([
    [0, () => 3],
    [3, (z: number) => z + 9],
    [7, () => 100],
  ]);
  const found = c.edited(edits);
  expect([0, 1, 2, 3].map((at) => found.id(at))).toEqual([3, 0, 1, 2]);
  expect([...found.z]).toEqual([11, 4, 3, 3]);
});

test("edits by any amount give the order, sums and entropy of a row that had these logits from the start", () => {
  for (let round = 0; round < 60; round++) {
    const z = Float64Array.from(logits(40, round), (x) => Math.round(x)); // with equal ones
    const row = new Row(z);
    const [changed, edits] = [z.slice(), new Map<number, () => number>()];
    for (let k = 0; k < round % 41; k++) {
      const id = Math.floor(40 * uniform(round, 1, k));
      const value = Math.round((k % 3 ? 10 : 900) * (uniform(round, 2, k) - 0.5));
      changed[id] = value;
      edits.set(row.rankOf(id), () => value);
    }
    const [found, want] = [row.candidates.edited(edits), new Row(changed)];
    expect([...found.z.keys()].map((at) => found.id(at))).toEqual([...want.ids]);
    expectClose([found.total, found.entropy], [want.candidates.total, want.entropy], 1e-10);
    expectClose(
      [...found.z.keys()].map((at) => found.p(at)),
      [...want.ids.keys()].map((at) => want.p(at)),
      1e-12,
    );
  }
});

test("stages that are not computed again leave what a new row's stages leave", () => {
  const z = logits(400, 8);
  const row = new Row(z);
  const context = { prompt: [4, 9, 4], output: [9, 11] };
  const values: Partial<Options>[] = [
    { temperature: 1.3, repetition_penalty: 1.2, frequency_penalty: 0.4, top_p: 0.97, typical_p: 0.9 },
    { temperature: 1.3, repetition_penalty: 1.2, frequency_penalty: 0.4, top_p: 0.9, typical_p: 0.9 },
    { temperature: 0.6, repetition_penalty: 1.2, frequency_penalty: 0.4, top_p: 0.9, typical_p: 0.9 },
    { temperature: 0.6, repetition_penalty: 1.2, top_p: 0.9, typical_p: 0.9 },
    { temperature: 0.6, repetition_penalty: 1.9, top_p: 0.9, typical_p: 0.9 },
    { temperature: 0.6, repetition_penalty: 1.9, top_p: 0.9, typical_p: 0.9, top_k: 5 },
    { temperature: 0.6, xtc_probability: 0.5, xtc_threshold: 0.01 },
    {},
  ];
  for (const [at, options] of values.entries())
    for (const situation of [context, { ...context, output: [1, 2] }, { ...context, seed: at + 2 }]) {
      const [found, want] = [row, new Row(z)].map((one) => processed(one, options, ORDERS.hf, situation));
      expect(found?.steps).toEqual(want?.steps);
      expect(found?.probability).toEqual(want?.probability);
      for (let rank = 0; rank < 400; rank++) expect(found?.removedAt(rank)).toEqual(want?.removedAt(rank));
    }
});

test("the token drawn has the largest sum of logit and noise", () => {
  const row = new Row(logits(20_000, 9));
  for (const [position, options] of [{}, { temperature: 3 }, { top_k: 50 }, { typical_p: 0.5 }].entries()) {
    const found = processed(row, options);
    const noise = gumbels(3, position, row.ids.length);
    const sums = Array.from(row.ids, (id, rank) => Math.log(found.p(rank)) + (noise[id] ?? NaN));
    const want = sums.indexOf(Math.max(...sums));
    expect([found.drawAt(3, position), found.draw(row.noise(3, position))]).toEqual([want, want]);
  }
});

test("tokens are sorted by logit, then id, whatever their signs", () => {
  const z = [0, -0, 1e-40, -1e-40, 3, -3, Infinity, -Infinity, 3, -Infinity, 1e30];
  const want = [...z.keys()].sort((a, b) => (z[b] === z[a] ? 0 : (z[b] ?? 0) > (z[a] ?? 0) ? 1 : -1) || a - b);
  expect([...new Row(Float32Array.from(z)).ids]).toEqual(want);
  expect([...new Row(Float64Array.from(z)).ids]).toEqual(want);
});

test("ranks, entropy and probabilities of the model's own distribution", () => {
  const z = logits(300, 5);
  const row = new Row(z);
  const p = softmax([...z]);
  expectClose([...row.probability], p);
  expectClose([row.entropy], [entropy([...z])], 1e-10);
  row.ids.forEach((id, rank) => expect(row.rankOf(id)).toBe(rank));
  expect(row.rankOf(300)).toBe(-1);
  expectClose([row.logP(7)], [Math.log(row.p(7))], 1e-12);
});

test("mirostat is refused where the library refuses it", () => {
  const chain = (options: Partial<Options>, order: readonly StageName[] = ORDERS.hf) =>
    activeStages({ ...NEUTRAL, ...options }, order);
  expect(problemOf(chain({ mirostat: 2, temperature: 0.5 }))).toBeUndefined();
  expect(problemOf(chain({ mirostat: 2, top_k: 5 }))).toEqual({ code: "mirostat_alone", stage: "top_k" });
  const early: StageName[] = ["mirostat", ...STAGES.filter((name) => name !== "mirostat")];
  expect(problemOf(chain({ mirostat: 1, temperature: 0.5 }, early))).toEqual({
    code: "mirostat_last",
    stage: "temperature",
  });
});

test("the sampler in the words of other programs", () => {
  const options = { ...NEUTRAL, temperature: 0.7, top_p: 0.9, xtc_probability: 0.5, frequency_penalty: 0.2 };
  const chain = { stages: activeStages(options, ORDERS.hf), order: ORDERS.hf, seed: 3 };
  expect(translated(chain, "huggingface")).toEqual({
    code: "from transformers import GenerationConfig\n\nconfig = GenerationConfig(do_sample=True, top_k=0, temperature=0.7, top_p=0.9)",
    missing: ["frequency_penalty", "xtc_probability"],
    reordered: true,
    recounted: false,
  });
  expect(translated(chain, "vllm").code).toBe(
    "from vllm import SamplingParams\n\nparams = SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=0.2, seed=3)",
  );
  expect(translated(chain, "llama.cpp").code).toBe(
    "--samplers 'penalties;temperature;top_p;xtc' --top-k 0 --top-p 0.9 --min-p 0 --temp 0.7 --xtc-probability 0.5 --frequency-penalty 0.2 --repeat-last-n -1 --seed 3",
  );
  expect(translated(chain, "llama.cpp").recounted).toBe(true);
  const theirs = { ...chain, order: ORDERS["llama.cpp"] };
  expect(translated(theirs, "llama.cpp").code).not.toContain("--repeat-last-n");
  expect(translated(theirs, "llama.cpp").recounted).toBe(false);
  expect(pythonSampler(chain).expression).toBe(
    'lmhead.Sampler(temperature=0.7, top_p=0.9, xtc_probability=0.5, frequency_penalty=0.2, order="hf", seed=3)',
  );
  const own = { ...chain, order: [...STAGES].reverse(), stages: [...chain.stages].reverse() };
  expect(commandOptions(own)).toBeUndefined();
  expect(pythonSampler(own)).toEqual({
    imports: ["from lmhead.sampling import CountPenalty, Temperature, TopP, XTC"],
    expression: "lmhead.Sampler(stages=[XTC(0.5, 0.1), TopP(0.9), Temperature(0.7), CountPenalty(0.2, 0.0)], seed=3)",
  });
});
