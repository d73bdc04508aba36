// A sorted row against the plain filters: the same words, the same probabilities, the same draw.
import { expect, test } from "vitest";
import { kept, run, type Stage } from "../src/math/filters";
import { draw, gumbels, uniform } from "../src/math/philox";
import { entropy, softmax } from "../src/math/softmax";
import { Row, type Settings } from "../src/next/row";
import { expectClose } from "./golden";

function logits(size: number, seed: number): Float32Array {
  return Float32Array.from({ length: size }, (_, id) => 12 * uniform(seed, 0, id) ** 3 - (id % 7 ? 0 : 2));
}

const SETTINGS: Settings[] = [
  { temperature: 1, topK: 0, topP: 1, minP: 0, order: "hf" },
  { temperature: 0.5, topK: 0, topP: 0.8, minP: 0, order: "hf" },
  { temperature: 0.5, topK: 0, topP: 0.8, minP: 0, order: "llama.cpp" },
  { temperature: 2, topK: 40, topP: 0.95, minP: 0.3, order: "hf" },
  { temperature: 2, topK: 40, topP: 0.95, minP: 0.3, order: "llama.cpp" },
  { temperature: 0.1, topK: 1, topP: 0.01, minP: 1, order: "hf" },
];

function stages({ temperature, topK, topP, minP, order }: Settings, size: number): Stage[] {
  const cuts: Stage[] = [
    { name: "top_k", value: topK || size },
    { name: "top_p", value: topP },
    { name: "min_p", value: minP },
  ];
  const warm: Stage = { name: "temperature", value: temperature };
  return order === "hf" ? [warm, ...cuts] : [...cuts, warm];
}

test("a chain on a sorted row is the chain on the plain one", () => {
  for (const size of [1, 6, 500])
    for (const settings of SETTINGS) {
      const z = logits(size, size);
      const plain = run(stages(settings, size), [...z]).logits;
      const row = new Row(z);
      const processed = row.process(settings);
      const ids = [...row.ids.slice(0, processed.words)];
      expect(ids).toEqual(kept(plain));
      const p = softmax(plain);
      expectClose([...row.ids].map((_, place) => processed.p(place)), [...row.ids].map((id) => p[id] ?? NaN));
      expectClose([processed.entropy], [entropy(plain)], 1e-10);
      expect(row.ids[processed.draw(gumbels(42, 7, size))]).toBe(draw(plain, 42, 7));
      expect(processed.cuts.at(-1)?.left ?? size).toBe(processed.words);
    }
});

test("ranks, entropy and mass of the model's own distribution", () => {
  const z = logits(300, 5);
  const row = new Row(z);
  const p = softmax([...z]);
  expectClose([...row.ids].map((_, place) => row.p(place)), [...row.ids].map((id) => p[id] ?? NaN));
  expectClose([row.entropy], [entropy([...z])], 1e-10);
  row.ids.forEach((id, place) => expect(row.placeOf(id)).toBe(place));
});

test("masked words have probability 0", () => {
  const row = new Row(Float32Array.from([1, -Infinity, 2]));
  expect([...row.ids]).toEqual([2, 0, 1]);
  expect(row.p(2)).toBe(0);
  expect(row.entropy).toBeCloseTo(entropy([1, -Infinity, 2]), 12);
});
