// The memory of a loss, tensor by tensor, without inputs and results: torch with all logits, and the
// streamed loss of this package.

import { DEFAULT_MAX_BYTES, makePlan, type Plan } from "./tilePlan";

export type Dtype = "float32" | "bfloat16";
/** cross_entropy(linear(h, W), y), or with .float() before it, as in transformers. */
export type Written = "plain" | "upcast";

export interface Sizes {
  readonly vocab: number;
  readonly width: number;
  readonly tokens: number;
  readonly dtype: Dtype;
  readonly written: Written;
  readonly maxBytes: number;
}

export type TensorName = "log_softmax" | "grad_log_softmax" | "grad_logits" | "tiles" | "sums";

export interface Tensor {
  readonly name: TensorName;
  readonly shape: string;
  readonly dtype: Dtype;
  readonly bytes: number;
}

export interface Memory {
  readonly dense: readonly Tensor[];
  readonly streamed: readonly Tensor[];
  readonly plan: Plan;
  /** The gradients of W and h, which both return. */
  readonly results: number;
}

export const BYTES: Record<Dtype, number> = { float32: 4, bfloat16: 2 };

export function memory({ vocab, width, tokens, dtype, written, maxBytes }: Sizes): Memory {
  // torch's peak is in the backward pass of log_softmax: its saved output, the incoming gradient and the
  // outgoing one. The logits have been freed.
  const inLoss: Dtype = written === "upcast" ? "float32" : dtype;
  const all = { shape: "N × V", dtype: inLoss, bytes: tokens * vocab * BYTES[inLoss] };
  const dense: Tensor[] = [
    { name: "log_softmax", ...all },
    { name: "grad_log_softmax", ...all },
    { name: "grad_logits", ...all },
  ];
  const converts = dtype === "bfloat16";
  const plan = makePlan(tokens, vocab, width, converts, maxBytes);
  const streamed: Tensor[] = [{ name: "tiles", shape: "", dtype: "float32", bytes: plan.bytes }];
  // Half-precision gradients are accumulated in float32 and rounded once at the end.
  if (converts)
    streamed.push({ name: "sums", shape: "(V + N) × D", dtype: "float32", bytes: 4 * (vocab + tokens) * width });
  return { dense, streamed, plan, results: BYTES[dtype] * (vocab + tokens) * width };
}

export function total(tensors: readonly Tensor[]): number {
  return tensors.reduce((sum, { bytes }) => sum + bytes, 0);
}

/** "384 MiB", "1.50 GiB". */
export function showBytes(bytes: number): string {
  const unit = Math.min(4, Math.max(1, Math.floor(Math.log2(Math.max(1, bytes)) / 10)));
  const value = bytes / 1024 ** unit;
  const digits = value >= 99.95 || Number.isInteger(value) ? 0 : value >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)}\u00a0${["", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export interface Preset {
  readonly name: string;
  readonly vocab: number;
  readonly width: number;
}

export const PRESETS: readonly Preset[] = [
  { name: "SmolLM2 135M", vocab: 49_152, width: 576 },
  { name: "GPT-2", vocab: 50_257, width: 768 },
  { name: "Llama 3 8B", vocab: 128_256, width: 4096 },
  { name: "Qwen3 0.6B", vocab: 151_936, width: 1024 },
  { name: "Gemma 3 1B", vocab: 262_144, width: 1152 },
];

export const BUDGETS = [32, 128, 512] as const;
export const DEFAULT_BUDGET = DEFAULT_MAX_BYTES / 2 ** 20;

/** Python code for these numbers; `values` are the results of its last two lines. */
export function pythonOf(sizes: Sizes): { code: string; values: number[] } {
  const { vocab, width, tokens, dtype, maxBytes } = sizes;
  const found = memory(sizes);
  const options = [
    "itemsize=4",
    `converts=${dtype === "bfloat16" ? "True" : "False"}`,
    "retain=True",
    ...(maxBytes === DEFAULT_MAX_BYTES ? [] : [`max_bytes=${maxBytes}`]),
  ];
  const item = BYTES[found.dense[0]?.dtype ?? dtype];
  const sums = found.streamed.length > 1 ? " + 4 * (V + N) * D" : "";
  const code = [
    "from lmhead.sweep.questions import make_plan",
    "",
    `V, D, N = ${vocab}, ${width}, ${tokens}`,
    `3 * N * V * ${item}`,
    `make_plan(N, V, D, ${options.join(", ")}).bytes${sums}`,
  ].join("\n");
  return { code, values: [total(found.dense), total(found.streamed)] };
}

/** The training step with the streamed loss. */
export function stepOf({ vocab, width, tokens, dtype, maxBytes }: Sizes): string {
  const limit = maxBytes === DEFAULT_MAX_BYTES ? "" : `, max_bytes=${maxBytes}`;
  return [
    "import torch, lmhead",
    "",
    `hidden = torch.randn(${tokens}, ${width}, dtype=torch.${dtype}, requires_grad=True)`,
    `weight = torch.randn(${vocab}, ${width}, dtype=torch.${dtype}, requires_grad=True)`,
    `targets = torch.randint(${vocab}, (${tokens},))`,
    `loss = lmhead.linear_cross_entropy(hidden, weight, targets${limit})`,
    "loss.backward()",
  ].join("\n");
}
