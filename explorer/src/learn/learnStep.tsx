// One step of the Learn page: text and formula on one side, controls and charts on the other.

import { createContext, type ComponentChildren, type JSX } from "preact";
import { useContext } from "preact/hooks";
import { useStrings } from "../i18n/strings";
import { Slider } from "../ui/controls";
import { fixed } from "../ui/format";
import { Inline, Prose, Python } from "../ui/prose";
import { STEP_CODE, type StepId } from "./learnPython";
import type { Learn } from "./useLearn";

/** The place of a step on its page, from 1. */
export const StepNumber = createContext(1);

interface StepProps {
  readonly id: StepId;
  readonly learn: Learn;
  readonly texts: { readonly title: string; readonly text: string; readonly try: string };
  /** Replaces `texts.try`. */
  readonly tryThis?: string;
  readonly formula: ComponentChildren;
  readonly children: ComponentChildren;
}

export function Step({ id, learn, texts, tryThis, formula, children }: StepProps): JSX.Element {
  const { common } = useStrings();
  const number = useContext(StepNumber);
  return (
    <section class="step" id={id} aria-labelledby={`${id}-title`}>
      <div class="text-column">
        <h2 id={`${id}-title`}>
          <span class="count" aria-hidden="true">
            {number}
          </span>
          {texts.title}
        </h2>
        <Prose text={texts.text} />
        {formula}
        <p class="try">
          <strong>{common.try}</strong> <Inline text={tryThis ?? texts.try} />
        </p>
      </div>
      <div class="play">{children}</div>
      <Python {...STEP_CODE[id](learn)} />
    </section>
  );
}

interface StepSliderProps {
  readonly name: string;
  readonly label: string;
  readonly value: number;
  /** Low, high, step. */
  readonly range: readonly [number, number, number];
  readonly shown?: string;
  onMove(value: number, drag: boolean): void;
}

/** A slider whose value is shown with the decimals of its step. */
export function StepSlider({ range: [low, high, step], shown, onMove, ...rest }: StepSliderProps): JSX.Element {
  const text = shown ?? fixed(rest.value, String(step).split(".")[1]?.length ?? 0);
  return <Slider {...rest} low={low} high={high} step={step} shown={text} onMove={(value) => onMove(value, true)} />;
}
