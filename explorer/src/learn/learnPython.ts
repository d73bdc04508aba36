// The Python code of every step, with the current settings, and the values of its expressions.
//
// The steps are one program: each may use what those before it have computed.

import { naive, round, stable } from "../math/floatFormats";
import { huffman, leafProbability, paths } from "../math/huffman";
import { dot, layerNorm, linear, mean, sigmoid, type Vector } from "../math/linear";
import { crossEntropyGradient, entropy, logSoftmax, normalize, softmax } from "../math/softmax";
import { py, pyList } from "../ui/format";
import { descend } from "./descent";
import { initialLayer, ROWS } from "./initialWeights";
import { BIASED, COUNTS, FORKS, KEYS, SUBLAYER, WEIGHT } from "./toyModel";
import { active, orderOf, type Card, type CardName, type Learn } from "./useLearn";

export interface StepCode {
  readonly code: string;
  /** The results of the code's expressions, in order; a test runs the code and compares. */
  readonly values: readonly unknown[];
}

/** How many draws are listed one by one. */
export const SHOWN = 12;
/** How many initial weights are listed. */
const LISTED = 4;
const TREE_PATHS = paths(huffman(COUNTS));

/** In the order of the page. */
export const STEP_CODE = {
  hidden: ({ h, stretch, norm, given }) =>
    step(
      [
        "import numpy as np",
        "from lmhead import reference as ref",
        "",
        `h = ${stretch === 1 ? "" : `${py(stretch)} * `}np.array(${pyList(h)})`,
        ...(norm ? ["h = ref.layer_norm(h)", "h"] : ["ref.layer_norm(h)  # not used below"]),
      ],
      [layerNorm(given)],
    ),
  norms: (learn) => {
    const { layer, rms, add } = norms(learn);
    return step(
      [
        `x, gamma, beta = np.array(${pyList(learn.given)}), ${py(learn.gamma)}, ${py(learn.beta)}`,
        `f = ${py(learn.sublayer)} * np.array(${pyList(SUBLAYER)})`,
        "ref.layer_norm(x, gamma, beta)",
        "gamma * x / np.sqrt(np.mean(x**2) + 1e-5)  # RMSNorm",
        "ref.layer_norm(x + f, gamma, beta)  # Add & Norm",
      ],
      [layer, rms, add],
    );
  },
  linear: ({ logits }) =>
    step([`W = np.array([${WEIGHT.map(pyList).join(", ")}])`, "z = ref.linear(h, W)", "z"], [logits]),
  bias: (learn) => {
    const { batch, positions, hidden } = learn;
    const { biases, scores } = biased(learn);
    return step(
      [
        `b = np.array(${pyList(biases)})`,
        "ref.linear(h, W, b)",
        `ref.linear(np.zeros((${batch}, ${positions}, ${hidden.length})), W, b).shape`,
      ],
      [scores, [batch, positions, WEIGHT.length]],
    );
  },
  initial: ({ initialSeed, width }) => {
    const layer = initialLayer(initialSeed, Number(width));
    return step(
      [
        "import torch",
        "",
        `seeded = torch.manual_seed(${initialSeed})`,
        `first = torch.nn.Linear(${width}, ${ROWS}, bias=False).weight.detach()`,
        `first[0, :${LISTED}]`,
        "first.std(correction=0)",
        `x = torch.empty(${width}).uniform_(-1, 1)`,
        "x = x / x.square().mean().sqrt()  # mean square 1, as after a norm",
        "(first @ x).std(correction=0)",
      ],
      [[...layer.weight.subarray(0, LISTED)], layer.weightDeviation, layer.logitDeviation],
    );
  },
  logits: ({ logits, shift }) => step([`ref.softmax(z + ${py(shift)})`], [softmax(logits.map((z) => z + shift))]),
  stable: ({ logits, big, format }) => {
    const z = logits.map((value, v) => (v === 0 ? big : value));
    return step(
      [
        `low = z.astype(${format === "fp32" ? "np.float32" : "np.float16"})`,
        `low[0] = ${py(big)}`,
        "np.exp(low) / np.exp(low).sum()  # without the shift",
        "ref.softmax(low)",
      ],
      [naive(z, format).p, softmax(z.map((value) => round(value, format)))],
    );
  },
  temperature: ({ logits, temperature }) =>
    step(
      [`ref.softmax(z, temperature=${py(temperature)})`, `ref.entropy(z / ${py(temperature)})`],
      [softmax(logits, temperature), entropy(logits.map((z) => z / temperature))],
    ),
  chain: ({ cards, seed, left }) =>
    step(
      [...samplerLines(cards, seed), "logits = torch.tensor(z)[None]", "sampler(logits).kept[0]"],
      [kept(left.ids())],
    ),
  draw: (learn) => {
    const { draws, logits, row } = learn;
    const tokens = drawnTokens(learn);
    return step(
      [
        "ref.greedy(z)",
        `tokens = sampler(logits.expand(${draws}, -1), position=torch.arange(${draws})).token`,
        `tokens[:${SHOWN}]`,
        `torch.bincount(tokens, minlength=${logits.length})`,
      ],
      [row.ids[0], tokens.slice(0, SHOWN), logits.map((_, v) => tokens.filter((token) => token === v).length)],
    );
  },
  loss: (learn) => {
    const { logits, target, smoothing, rate, steps } = learn;
    const { losses } = descend(learn);
    const options = lossOptions(learn);
    return step(
      [
        `ref.cross_entropy(z, ${target}${options})`,
        `ref.cross_entropy_backward(z, ${target}${options})`,
        "trained = W",
        `for _ in range(${steps}):`,
        `    grads = ref.linear_cross_entropy_backward(h, trained, ${target}${options})`,
        `    trained = trained - ${py(rate)} * grads.weight`,
        `ref.linear_cross_entropy(h, trained, ${target}${options})`,
      ],
      [losses[0], crossEntropyGradient(logits, target, smoothing), losses.at(-1)],
    );
  },
  backward: (learn) => {
    const { weight, bias, hidden } = gradients(learn);
    const zeros = `bias=np.zeros(${WEIGHT.length})`;
    return step(
      [
        `grads = ref.linear_cross_entropy_backward(h, W, ${learn.target}, ${zeros}${lossOptions(learn)})`,
        "grads.weight",
        "grads.bias",
        "grads.x",
        "trained",
      ],
      [weight, bias, hidden, descend(learn).weight],
    );
  },
  jacobian: ({ logits }) => step(["p = ref.softmax(z)", "np.diag(p) - np.outer(p, p)"], [jacobian(softmax(logits))]),
  whylogits: (learn) => {
    const { target, low } = learn;
    const { z, naive: literal, exact } = loweredTarget(learn);
    return step(
      [
        "low = z.copy()",
        `low[${target}] = ${py(low)}`,
        "e = np.exp((low - low.max()).astype(np.float32))",
        `-np.log(e[${target}] / e.sum())  # inf once p underflows to 0`,
        `np.logaddexp.reduce(low) - low[${target}]`,
        `ref.cross_entropy(low, ${target})`,
        "int(np.argmax(low)), int(np.argmax(ref.softmax(low)))",
      ],
      [literal, exact, exact, [argmax(z), argmax(softmax(z))]],
    );
  },
  compare: ({ scores: x }) =>
    step(
      [`x = np.array(${pyList(x)})`, "ref.normalize(x)", "ref.softmax(x)", "ref.sigmoid(x)", "ref.relu(x)"],
      [normalize(x), softmax(x), x.map(sigmoid), x.map((value) => Math.max(0, value))],
    ),
  attention: (learn) =>
    step(
      [`K = np.array([${KEYS.map(pyList).join(", ")}])`, "ref.attention_weights(h[None], K)[0]"],
      [softmax(attentionScores(learn))],
    ),
  tree: ({ hidden }) =>
    step(
      [
        `tree = ref.huffman_tree(${JSON.stringify(COUNTS).replaceAll(",", ", ")})`,
        `forks = np.array([${FORKS.map(pyList).join(", ")}])`,
        "ref.leaf_probabilities(h, forks, tree)",
      ],
      [COUNTS.map((_, v) => leafProbability(TREE_PATHS.get(v) ?? [], hidden, FORKS))],
    ),
  translation: (learn) => {
    const states = decoderStates(learn);
    return step(
      [`H = np.array([${states.map(pyList).join(", ")}])  # two positions of the decoder`, "ref.linear(H, W)"],
      [states.map((state) => linear(state, WEIGHT))],
    );
  },
} as const satisfies Record<string, (learn: Learn) => StepCode>;

export type StepId = keyof typeof STEP_CODE;
export const STEP_IDS = Object.keys(STEP_CODE) as StepId[];

function step(lines: readonly string[], values: readonly unknown[]): StepCode {
  return { code: lines.join("\n"), values };
}

/** The sublayer's output f, and LayerNorm, RMSNorm and Add & Norm. */
export function norms({ given, gamma, beta, sublayer }: Learn) {
  const f = SUBLAYER.map((x) => x * sublayer);
  const affine = (x: Vector): number[] => layerNorm(x).map((value) => gamma * value + beta);
  const size = Math.sqrt(mean(given.map((value) => value * value)) + 1e-5);
  return {
    f,
    layer: affine(given),
    rms: given.map((value) => (gamma * value) / size),
    add: affine(given.map((x, d) => x + (f[d] ?? 0))),
  };
}

/** One bias per word, and the logits with them. */
export function biased({ logits, bias }: Learn): { biases: number[]; scores: number[] } {
  const biases = logits.map((_, v) => (v === BIASED ? bias : 0));
  return { biases, scores: logits.map((z, v) => z + (biases[v] ?? 0)) };
}

/** The words drawn at the first positions. */
export function drawnTokens({ row, left, seed, draws }: Learn): number[] {
  return Array.from({ length: Number(draws) }, (_, position) => row.ids[left.drawAt(seed, position)] ?? 0);
}

/** The gradient of the loss by W, b and h. */
export function gradients({ hidden, logits, target, smoothing }: Learn) {
  const bias = crossEntropyGradient(logits, target, smoothing);
  return {
    weight: bias.map((g) => hidden.map((h) => g * h)),
    bias,
    hidden: hidden.map((_, d) => bias.reduce((sum, g, v) => sum + g * (WEIGHT[v]?.[d] ?? 0), 0)),
  };
}

/** ∂p/∂z: p_i (δ_ij - p_j). */
export function jacobian(p: Vector): number[][] {
  return p.map((a, v) => p.map((b, u) => a * ((v === u ? 1 : 0) - b)));
}

/** The logits with the target's replaced, and its loss: through softmax in float32, and through log-sum-exp. */
export function loweredTarget({ logits, target, low }: Learn): { z: number[]; naive: number; exact: number } {
  const z = logits.map((x, v) => (v === target ? low : x));
  return {
    z,
    naive: Math.fround(-Math.log(stable(z, "fp32").p[target] ?? NaN)),
    exact: -(logSoftmax(z)[target] ?? NaN),
  };
}

/** q · k / √d for each key. */
export function attentionScores({ hidden }: Learn): number[] {
  return KEYS.map((key) => dot(key, hidden) / Math.sqrt(hidden.length));
}

/** Hidden states of two positions of a decoder. */
export function decoderStates({ hidden }: Learn): Vector[] {
  return [hidden, hidden.map((x) => -x)];
}

export function argmax(x: Vector): number {
  return x.indexOf(Math.max(...x));
}

function kept(ids: number[]): number[] {
  return ids.sort((a, b) => a - b);
}

function lossOptions({ smoothing }: Learn): string {
  return smoothing ? `, label_smoothing=${py(smoothing)}` : "";
}

const CLASSES: Record<CardName, string> = {
  temperature: "Temperature",
  top_k: "TopK",
  top_p: "TopP",
  min_p: "MinP",
  typical_p: "Typical",
};

function samplerLines(cards: readonly Card[], seed: number): string[] {
  const order = orderOf(cards);
  const on = active(cards);
  const head = ["import torch, lmhead"];
  if (order) {
    const options = on.map((stage) => `${stage.name}=${value(stage)}`);
    return [...head, "", `sampler = lmhead.Sampler(${[...options, `order="${order}"`, `seed=${seed}`].join(", ")})`];
  }
  const classes = on.map(({ name }) => CLASSES[name]).sort();
  if (on.length) head.push(`from lmhead.sampling import ${classes.join(", ")}`);
  const stages = on.map((stage) => `${CLASSES[stage.name]}(${value(stage)})`).join(", ");
  return [...head, "", `sampler = lmhead.Sampler(stages=[${stages}], seed=${seed})`];
}

function value(stage: Pick<Card, "name" | "value">): string {
  return stage.name === "top_k" ? String(stage.value) : py(stage.value);
}
