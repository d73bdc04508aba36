// The samplers of the two sides: what they start with, and how they are swapped.

import { givenOptions, OPTIONS, orderCodec, type OptionName, type Options } from "../sampler/options";
import type { SamplerState } from "../sampler/useSampler";

export type SideName = "a" | "b";

/** The options that this page has sliders for. */
export const COMPARED = ["temperature", "top_k", "top_p", "min_p"] as const satisfies readonly OptionName[];

// A is the narrower one, so that KL(A ‖ B) is finite.
export const INITIAL: Record<SideName, Partial<Options>> = { a: { temperature: 0.7, top_p: 0.9 }, b: {} };

/** The library's options, without those that are its defaults. */
export function libraryOptions({ stages, orderName }: SamplerState): Record<string, number | string> {
  return { ...givenOptions(stages), ...(orderName && orderName !== "hf" ? { order: orderName } : {}) };
}

/** The address with both samplers swapped. */
export function swapped(a: SamplerState, b: SamplerState): Record<string, string | null> {
  const written = (side: SideName, from: SamplerState): [string, string | null][] => [
    ...COMPARED.map((name): [string, string | null] => {
      const initial = INITIAL[side][name] ?? OPTIONS[name].neutral;
      return [OPTIONS[name].param + side, from.options[name] === initial ? null : String(from.options[name])];
    }),
    [`o${side}`, from.orderName === "hf" ? null : orderCodec.show(from.order)],
  ];
  return Object.fromEntries([...written("a", b), ...written("b", a)]);
}
