// The sampler in the syntax of other programs: Python, a command, Hugging Face, vLLM, llama.cpp.

import { pyOptions } from "../export/quote";
import { py } from "../ui/format";
import {
  givenOptions,
  NEUTRAL,
  OPTION_NAMES,
  OPTIONS,
  orderName,
  split,
  type OptionName,
  type Options,
  type Stage,
  type StageName,
} from "./options";
import type { Counting } from "./penalties";

export const INTEGERS = [...OPTION_NAMES.filter((name) => OPTIONS[name].integer), "seed"];

export interface Chain {
  /** The active stages, in order. */
  readonly stages: readonly Stage[];
  /** All stages, in order. */
  readonly order: readonly StageName[];
  readonly seed: number;
}

/** How the library writes a stage, as in `Sampler.explain`. */
export function stageRepr({ name, options: o }: Stage, counting: Counting): string {
  const [lastN, counted] = counting === "hf" ? ["None", "output"] : ["64", "context"];
  switch (name) {
    case "repetition_penalty":
      return `RepetitionPenalty(penalty=${py(o.repetition_penalty)}, counted='context', last_n=${lastN})`;
    case "frequency_penalty":
      return `CountPenalty(frequency=${py(o.frequency_penalty)}, presence=${py(o.presence_penalty)}, counted='${counted}', last_n=${lastN})`;
    case "dry_multiplier":
      return `DRY(multiplier=${py(o.dry_multiplier)}, base=${py(o.dry_base)}, allowed_length=${o.dry_allowed_length}, last_n=None, breakers=[])`;
    case "temperature":
      return o.dynatemp_range > 0
        ? `DynamicTemperature(temperature=${py(o.temperature)}, range=${py(o.dynatemp_range)}, exponent=${py(o.dynatemp_exponent)})`
        : `Temperature(temperature=${py(o.temperature)})`;
    case "top_n_sigma":
      return `TopNSigma(n=${py(o.top_n_sigma)})`;
    case "top_h":
      return `TopH(top_h=${py(o.top_h)})`;
    case "top_k":
      return `TopK(k=${py(o.top_k)}, ties='lowest')`;
    case "top_p":
      return `TopP(min_tokens_to_keep=1, p=${py(o.top_p)})`;
    case "min_p":
      return `MinP(min_tokens_to_keep=1, min_p=${py(o.min_p)})`;
    case "typical_p":
      return `Typical(min_tokens_to_keep=1, mass=${py(o.typical_p)})`;
    case "epsilon_cutoff":
      return `Epsilon(min_tokens_to_keep=1, epsilon=${py(o.epsilon_cutoff)})`;
    case "eta_cutoff":
      return `Eta(min_tokens_to_keep=1, epsilon=${py(o.eta_cutoff)})`;
    case "xtc_probability":
      return `XTC(probability=${py(o.xtc_probability)}, threshold=${py(o.xtc_threshold)}, min_tokens_to_keep=1)`;
    case "mirostat":
      return `Mirostat${o.mirostat}(tau=${py(o.mirostat_tau)}, eta=${py(o.mirostat_eta)})`;
  }
}

/** The arguments of the class of a stage, as short as they can be. */
function construction({ name, options: o }: Stage): string {
  switch (name) {
    case "repetition_penalty":
      return `RepetitionPenalty(${py(o.repetition_penalty)})`;
    case "frequency_penalty":
      return `CountPenalty(${py(o.frequency_penalty)}, ${py(o.presence_penalty)})`;
    case "dry_multiplier":
      return `DRY(${py(o.dry_multiplier)}, ${py(o.dry_base)}, ${o.dry_allowed_length})`;
    case "temperature":
      return o.dynatemp_range > 0
        ? `DynamicTemperature(${py(o.temperature)}, ${py(o.dynatemp_range)}, ${py(o.dynatemp_exponent)})`
        : `Temperature(${py(o.temperature)})`;
    case "top_n_sigma":
      return `TopNSigma(${py(o.top_n_sigma)})`;
    case "top_h":
      return `TopH(${py(o.top_h)})`;
    case "top_k":
      return `TopK(${o.top_k})`;
    case "top_p":
      return `TopP(${py(o.top_p)})`;
    case "min_p":
      return `MinP(${py(o.min_p)})`;
    case "typical_p":
      return `Typical(${py(o.typical_p)})`;
    case "epsilon_cutoff":
      return `Epsilon(${py(o.epsilon_cutoff)})`;
    case "eta_cutoff":
      return `Eta(${py(o.eta_cutoff)})`;
    case "xtc_probability":
      return `XTC(${py(o.xtc_probability)}, ${py(o.xtc_threshold)})`;
    case "mirostat":
      return `Mirostat${o.mirostat}(${py(o.mirostat_tau)}, ${py(o.mirostat_eta)})`;
  }
}

export interface PythonSampler {
  /** Lines that it needs before it. */
  readonly imports: readonly string[];
  readonly expression: string;
}

/** `lmhead.Sampler(...)`, by options in the order of a known program, else stage by stage. */
export function pythonSampler({ stages, order, seed }: Chain): PythonSampler {
  const name = orderName(order);
  if (name)
    return {
      imports: [],
      expression: `lmhead.Sampler(${pyOptions({ ...givenOptions(stages), order: name, seed }, INTEGERS)})`,
    };
  const made = stages.map(construction);
  const classes = [...new Set(made.map((one) => one.slice(0, one.indexOf("("))))].sort();
  return {
    imports: classes.length ? [`from lmhead.sampling import ${classes.join(", ")}`] : [],
    expression: `lmhead.Sampler(stages=[${made.join(", ")}], seed=${seed})`,
  };
}

/** Options of a command; undefined for an order that no option names. */
export function commandOptions({ stages, order, seed }: Chain): readonly string[] | undefined {
  const name = orderName(order);
  if (!name) return undefined;
  const given = Object.entries({ ...givenOptions(stages), order: name, seed });
  return given.map(([option, value]) => `--${option.replaceAll("_", "-")} ${value}`);
}

export const PROGRAMS = ["huggingface", "vllm", "llama.cpp"] as const;
export type Program = (typeof PROGRAMS)[number];

export interface Translated {
  readonly code: string;
  /** The stages that the program does not have. */
  readonly missing: readonly StageName[];
  /** Whether the program would run the stages in another order. */
  readonly reordered: boolean;
  /** Whether its penalties also count the prompt, which ours do not. */
  readonly recounted: boolean;
}

const HUGGINGFACE = split<OptionName>(
  "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty",
);
const VLLM = split<OptionName>("temperature top_k top_p min_p repetition_penalty frequency_penalty presence_penalty");
/** The flag, and the name in `--samplers`. */
const LLAMA: Partial<Record<OptionName, string>> = {
  temperature: "temp",
  dynatemp_range: "dynatemp-range",
  dynatemp_exponent: "dynatemp-exp",
  top_k: "top-k",
  top_p: "top-p",
  min_p: "min-p",
  typical_p: "typical",
  top_n_sigma: "top-nsigma",
  xtc_probability: "xtc-probability",
  xtc_threshold: "xtc-threshold",
  mirostat: "mirostat",
  mirostat_tau: "mirostat-ent",
  mirostat_eta: "mirostat-lr",
  repetition_penalty: "repeat-penalty",
  frequency_penalty: "frequency-penalty",
  presence_penalty: "presence-penalty",
  dry_multiplier: "dry-multiplier",
  dry_base: "dry-base",
  dry_allowed_length: "dry-allowed-length",
};
const LLAMA_SAMPLERS: Partial<Record<StageName, string>> = {
  repetition_penalty: "penalties",
  frequency_penalty: "penalties",
  dry_multiplier: "dry",
  top_n_sigma: "top_n_sigma",
  top_k: "top_k",
  typical_p: "typ_p",
  top_p: "top_p",
  min_p: "min_p",
  xtc_probability: "xtc",
  temperature: "temperature",
};
// llama.cpp's own defaults filter; these switch that off unless an option is set.
const LLAMA_OFF: Partial<Options> = { top_k: 0, top_p: 1, min_p: 0, temperature: 1 };

/** The same sampler for another program. */
export function translated(chain: Chain, program: Program): Translated {
  const given = givenOptions(chain.stages) as Partial<Options>;
  const has = (names: readonly string[]): StageName[] =>
    chain.stages.filter((stage) => !names.includes(stage.name)).map(({ name }) => name);
  const active = chain.stages.map(({ name }) => name);
  const inOrder = (order: readonly StageName[]): boolean =>
    order.filter((name) => active.includes(name)).join() === active.join();
  if (program === "llama.cpp") {
    const named = [...new Set(chain.stages.flatMap(({ name }) => LLAMA_SAMPLERS[name] ?? []))];
    const options = Object.entries({ ...LLAMA_OFF, ...given })
      .filter(([name]) => LLAMA[name as OptionName])
      .map(([name, value]) => `--${LLAMA[name as OptionName]} ${value}`);
    // Ours has no sequence breakers, and counts the whole text unless the order is llama.cpp's.
    const countsAll = orderName(chain.order) !== "llama.cpp";
    const extra = [
      ...(active.includes("dry_multiplier") ? ["--dry-sequence-breaker none"] : []),
      ...(named.includes("penalties") && countsAll ? ["--repeat-last-n -1"] : []),
    ];
    const samplers = named.length && !given.mirostat ? [`--samplers '${named.join(";")}'`] : [];
    return {
      code: [...samplers, ...options, ...extra, `--seed ${chain.seed}`].join(" "),
      missing: chain.stages.filter(({ name }) => !(LLAMA_SAMPLERS[name] ?? LLAMA[name])).map(({ name }) => name),
      reordered: false,
      recounted: countsAll && active.includes("frequency_penalty"),
    };
  }
  const names = program === "vllm" ? VLLM : HUGGINGFACE;
  const own = Object.fromEntries(Object.entries(given).filter(([name]) => names.includes(name as OptionName)));
  // Hugging Face's default top_k is 50.
  const options = program === "vllm" ? { ...own, seed: chain.seed } : { do_sample: "True", top_k: 0, ...own };
  const text = pyOptions(options, INTEGERS).replace('"True"', "True");
  const missing = has(names);
  const dynamic = (given.dynatemp_range ?? NEUTRAL.dynatemp_range) > 0 && !missing.includes("temperature");
  return {
    code:
      program === "vllm"
        ? `from vllm import SamplingParams\n\nparams = SamplingParams(${text})`
        : `from transformers import GenerationConfig\n\nconfig = GenerationConfig(${text})`,
    missing: dynamic ? [...missing, "temperature"] : missing,
    reordered: !inOrder(PROGRAM_ORDER[program]),
    recounted: false,
  };
}

const PROGRAM_ORDER: Record<"huggingface" | "vllm", readonly StageName[]> = {
  huggingface: split("repetition_penalty temperature top_h top_k top_p min_p typical_p epsilon_cutoff eta_cutoff"),
  vllm: split("repetition_penalty frequency_penalty temperature min_p top_k top_p"),
};
