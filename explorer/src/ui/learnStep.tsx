// One step of the Learn page: text and formula on one side, controls and charts on the other.

import { createContext, type ComponentChildren, type JSX } from "preact";
import { useContext } from "preact/hooks";
import { useStrings } from "../i18n/strings";
import { Inline, Prose } from "./prose";

/** The place of a step on its page, from 1. */
export const StepNumber = createContext(1);

interface StepProps {
  readonly id: string;
  readonly title: string;
  readonly text: string;
  readonly tryThis: string;
  readonly formula: ComponentChildren;
  readonly python: ComponentChildren;
  readonly children: ComponentChildren;
}

export function Step(props: StepProps): JSX.Element {
  const { common } = useStrings();
  const number = useContext(StepNumber);
  return (
    <section class="step" id={props.id} aria-labelledby={`${props.id}-title`}>
      <div class="text-column">
        <h2 id={`${props.id}-title`}>
          <span class="count" aria-hidden="true">
            {number}
          </span>
          {props.title}
        </h2>
        <Prose text={props.text} />
        {props.formula}
        <p class="try">
          <strong>{common.try}</strong> <Inline text={props.tryThis} />
        </p>
      </div>
      <div class="play">{props.children}</div>
      {props.python}
    </section>
  );
}
