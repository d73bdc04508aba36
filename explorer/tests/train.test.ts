// The memory of a loss against the package's own plans, and a run put together from answers.
import { expect, test } from "vitest";
import { BYTES, PRESETS, memory, pythonOf, showBytes, stepOf, total, type Sizes } from "../src/train/lossMemory";
import { DEFAULT_MAX_BYTES, makePlan } from "../src/train/tilePlan";
import {
  at,
  best,
  clock,
  addNews,
  legible,
  stateOf,
  thin,
  timeLeft,
  type Line,
  type News,
  type Run,
} from "../src/train/trainingRun";
import { sizeOf, stopOf } from "../src/train/sizeField";
import golden from "./golden_plan.json";

const SIZES: Sizes = {
  vocab: 49_152,
  width: 576,
  tokens: 8192,
  dtype: "float32",
  written: "plain",
  maxBytes: DEFAULT_MAX_BYTES,
};

test("plans are the package's", () => {
  expect(DEFAULT_MAX_BYTES).toBe(golden.default_max_bytes);
  for (const [rows = 0, vocab = 0, width = 0, converts, most, ...want] of golden.plans) {
    const { chunkRows, tileTokens, retained, bytes } = makePlan(rows, vocab, width, converts === 1, most);
    expect([chunkRows, tileTokens, Number(retained), bytes], [rows, vocab, width, converts, most].join()).toEqual(want);
  }
});

test("three tables of logits, in the type that the loss is made in", () => {
  const table = SIZES.tokens * SIZES.vocab;
  for (const dtype of ["float32", "bfloat16"] as const) {
    expect(total(memory({ ...SIZES, dtype }).dense)).toBe(3 * table * BYTES[dtype]);
    expect(total(memory({ ...SIZES, dtype, written: "upcast" }).dense)).toBe(3 * table * 4);
  }
});

test("half-precision gradients are added up in float32", () => {
  expect(memory(SIZES).streamed.map(({ name }) => name)).toEqual(["tiles"]);
  const half = memory({ ...SIZES, dtype: "bfloat16" });
  expect(half.streamed.map(({ name }) => name)).toEqual(["tiles", "sums"]);
  expect(half.streamed[1]?.bytes).toBe(2 * half.results);
});

test("the Python names what differs from the defaults, and nothing else", () => {
  expect(pythonOf(SIZES).code).not.toContain("max_bytes");
  const other = { ...SIZES, dtype: "bfloat16", maxBytes: 2 ** 25 } as const;
  expect(pythonOf(other).code).toContain("converts=True, retain=True, max_bytes=33554432).bytes + 4 * (V + N) * D");
  expect(stepOf(other)).toContain("dtype=torch.bfloat16");
  expect(stepOf(SIZES)).toContain("linear_cross_entropy(hidden, weight, targets)");
});

test("bytes in three figures", () => {
  const shown = [1024, 1536, 2 ** 20, 402_653_184, 1.5 * 2 ** 30, 12_884_901_888, 99.97 * 2 ** 20, 2 ** 50].map(
    showBytes,
  );
  const want = ["1 KiB", "1.50 KiB", "1 MiB", "384 MiB", "1.50 GiB", "12 GiB", "100 MiB", "1024 TiB"];
  expect(shown.map((text) => text.replace("\u00a0", " "))).toEqual(want);
});

test("every stop of a size leads back to itself, and each is larger than the last", () => {
  for (let stop = 32; stop < 168; stop++) {
    expect(stopOf(sizeOf(stop))).toBe(stop);
    expect(sizeOf(stop + 1)).toBeGreaterThan(sizeOf(stop));
    expect(Number.isInteger(sizeOf(stop))).toBe(true);
  }
  for (const { vocab, width } of PRESETS) {
    expect(Math.abs(sizeOf(stopOf(vocab)) / vocab - 1)).toBeLessThan(0.07);
    expect(Math.abs(sizeOf(stopOf(width)) / width - 1)).toBeLessThan(0.07);
  }
});

// Runs

const ABOUT = { name: "run", steps: 100, task: "text", head: "full" };

function news(lines: readonly Line[], start: number, age: number | null = 0): News {
  return { run: ABOUT, start, end: start + lines.length, mark: "", more: false, age, lines };
}

test("answers add up, and one that starts over replaces all", () => {
  const first = addNews(undefined, news([{ step: 10, loss: 4, seconds: 5, tokens_per_second: 100 }], 0));
  const second = addNews(
    first,
    news(
      [
        { step: 20, valid: { loss: 3.5, bleu: 2 } },
        { step: 20, sample: "x" },
      ],
      1,
    ),
  );
  expect(second.train).toEqual([{ step: 10, value: 4 }]);
  expect(second.valid).toEqual([{ step: 20, value: 3.5 }]);
  expect(second.samples).toEqual([{ step: 20, text: "x" }]);
  expect([second.step, second.seconds]).toEqual([20, 5]);
  const same = addNews(second, news([], 3));
  expect(same.train).toBe(second.train);
  const restarted = addNews(second, news([{ step: 5, loss: 6 }], 0));
  expect([restarted.train, restarted.valid, restarted.samples, restarted.step, restarted.seconds]).toEqual([
    [{ step: 5, value: 6 }],
    [],
    [],
    5,
    0,
  ]);
});

test("the state of a run, and the time left", () => {
  const lines = [10, 20, 30, 40].map((step) => ({ step, loss: 4, seconds: step / 2 }));
  const run = (age: number | null, more: readonly Line[] = []): Run =>
    addNews(undefined, news([...lines, ...more], 0, age));
  expect(stateOf(run(null))).toBe("absent");
  expect(stateOf(run(1))).toBe("training");
  expect(stateOf(run(49))).toBe("training"); // a line every 5 s: ten times that is nothing unusual
  expect(stateOf(run(51))).toBe("silent");
  expect(stateOf(run(9999, [{ step: 100, loss: 3 }]))).toBe("done");
  expect(timeLeft(run(1))).toBe(30);
  expect(timeLeft(addNews(undefined, news([], 0)))).toBeUndefined();
  const valid = [
    [10, 3],
    [20, 2],
    [30, 2],
    [40, 4],
  ].map(([step = 0, loss = 0]) => ({ step, valid: { loss } }));
  expect(best(run(1, valid))).toEqual({ step: 20, value: 2 });
  expect(best(run(1))).toBeUndefined();
  expect(timeLeft({ ...run(1), about: { ...ABOUT, steps: null } })).toBeUndefined();
});

test("the last point at or before a step", () => {
  const points = [10, 20, 30].map((step) => ({ step, value: step }));
  expect([5, 10, 19, 30, 99].map((step) => at(points, step)?.value)).toEqual([undefined, 10, 10, 30, 30]);
});

test("thinning keeps ends and peaks", () => {
  const points = Array.from({ length: 100_000 }, (_, step) => ({ step, value: Math.sin(step) }));
  points[5000] = { step: 5000, value: 99 };
  points[70_001] = { step: 70_001, value: -99 };
  const few = thin(points, 800);
  expect(few.length).toBeLessThanOrEqual(800);
  expect(few).toContain(points[5000]);
  expect(few).toContain(points[70_001]);
  expect([few[0], few.at(-1)]).toEqual([points[0], points.at(-1)]);
  expect(few.every(({ step }, i) => i === 0 || step > (few[i - 1]?.step ?? 0))).toBe(true);
  expect(thin(points.slice(0, 5), 800)).toHaveLength(5);
});

test("clocks and sample text", () => {
  expect([5, 65, 3700, 59.7].map(clock)).toEqual(["0:05", "1:05", "1:01:40", "1:00"]);
  expect(legible("a\tb\n你\u001b[31m\u202ex")).toBe("a\tb\n你\ufffd[31m\ufffdx");
});
