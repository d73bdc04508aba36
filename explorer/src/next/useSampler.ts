// The sampler's settings, in the address: read, set, and as the server's questions name them.

import { number, oneOf, useParam, type Set } from "../url";
import type { Settings, Whose } from "./row";

/** What `Sampler` of the package is given. */
export type Options = Record<string, number | string>;

interface Numbers {
  readonly temperature: number;
  readonly topK: number;
  readonly topP: number;
  readonly minP: number;
  readonly typicalP: number;
  readonly repetition: number;
  readonly frequency: number;
  readonly presence: number;
}

export interface SamplerState {
  readonly settings: Settings & Numbers & { readonly order: Whose };
  readonly seed: number;
  readonly options: Options;
  readonly set: { readonly [name in keyof Numbers]: Set<number> } & {
    readonly order: Set<Whose>;
    readonly seed: Set<number>;
  };
}

export function useSampler(): SamplerState {
  const [temperature, setTemperature] = useParam("t", number(1, 0.05, 3));
  const [k, setTopK] = useParam("k", number(0, 0, 200));
  const [topP, setTopP] = useParam("p", number(1, 0, 1));
  const [minP, setMinP] = useParam("m", number(0, 0, 1));
  const [typicalP, setTypicalP] = useParam("typ", number(1, 0.01, 1));
  const [repetition, setRepetition] = useParam("rep", number(1, 0.5, 2));
  const [frequency, setFrequency] = useParam("freq", number(0, -2, 2));
  const [presence, setPresence] = useParam("pres", number(0, -2, 2));
  const [order, setOrder] = useParam("order", oneOf<Whose>("hf", ["hf", "llama.cpp"]));
  const [given, setSeed] = useParam("seed", number(0, 0, Number.MAX_SAFE_INTEGER));
  const [topK, seed] = [Math.floor(k), Math.floor(given)];
  return {
    settings: { temperature, topK, topP, minP, typicalP, repetition, frequency, presence, order },
    seed,
    options: {
      temperature,
      top_k: topK,
      top_p: topP,
      min_p: minP,
      typical_p: typicalP,
      repetition_penalty: repetition,
      frequency_penalty: frequency,
      presence_penalty: presence,
      order,
      seed,
    },
    set: {
      temperature: setTemperature,
      topK: setTopK,
      topP: setTopP,
      minP: setMinP,
      typicalP: setTypicalP,
      repetition: setRepetition,
      frequency: setFrequency,
      presence: setPresence,
      order: setOrder,
      seed: setSeed,
    },
  };
}
