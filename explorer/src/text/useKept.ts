// A text that the address holds, whatever its length.

import { useMemo } from "preact/hooks";
import { text as textCodec, useParam } from "../url";
import { keep, recall, wellFormed } from "./keep";

/** A text of the page, and how another one would be written in the address. */
export interface TextField {
  /** Undefined where a long text was kept in another tab. */
  readonly text: string | undefined;
  /** Whether it is a long one. */
  readonly held: boolean;
  /**
   * Of the field that shows it: another text, another field. The sample has one in all languages, so
   * that what somebody has begun to write there outlives a change of language.
   */
  readonly key: string;
  to(text: string): Record<string, string | null>;
}

/**
 * The text under a name of the address; the sample if there is none.
 *
 * What is said about a text belongs to it: a step that does so writes `to(text)` along, so that the
 * sample of another language does not take its place.
 */
export function useKept(name: string, sample: string, heldName = "held"): TextField {
  const [short] = useParam(name, textCodec(sample));
  const [held] = useParam(heldName, textCodec(""));
  const text = useMemo(() => (held ? recall(held) : short), [held, short]);
  const to = (next: string): Record<string, string | null> => {
    const kept = keep(wellFormed(next));
    return { [name]: kept.text, [heldName]: kept.held };
  };
  return { text, held: held !== "", key: held || (short === sample ? "sample" : `of ${short}`), to };
}
