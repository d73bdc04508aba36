// The prompt, shared by all pages: in the address, or in the tab's storage if it is long.

import { useContext, useMemo } from "preact/hooks";
import type { Model } from "../api";
import { Language, LANGUAGES, useStrings } from "../i18n/strings";
import { text as textCodec, useParam } from "../url";
import { storedText, storeText, wellFormed } from "./storedText";

/** A text of the page and how to change it. */
export interface TextField {
  /** Undefined if a long text was stored by another tab. */
  readonly text: string | undefined;
  /** Whether it is a long text. */
  readonly held: boolean;
  /** Changes with the text; the sample has the same key in all languages. */
  readonly key: string;
  to(text: string): Record<string, string | null>;
}

/**
 * The prompt in the address, or a sample in a language of the model.
 *
 * An action on the text also writes `to(text)`, so that a change of language does not replace it by
 * another sample.
 */
export function usePromptParam(model: Model | undefined): TextField {
  const { prompt: s } = useStrings();
  const lang = useContext(Language);
  const sample = model?.languages.includes(lang) ? s.sample : LANGUAGES.en.strings.prompt.sample;
  const [short] = useParam("prompt", textCodec(sample));
  const [held] = useParam("held", textCodec(""));
  const text = useMemo(() => (held ? storedText(held) : short), [held, short]);
  const to = (next: string): Record<string, string | null> => {
    const kept = storeText(wellFormed(next));
    return { prompt: kept.text, held: kept.held };
  };
  return { text, held: held !== "", key: held || (short === sample ? "sample" : `of ${short}`), to };
}
