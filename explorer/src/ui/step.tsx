// One step of the story: words and formula on one side, something to move on the other.

import type { ComponentChildren, JSX } from "preact";
import { useStrings } from "../i18n";
import { Prose } from "./prose";

interface StepProps {
  readonly id: string;
  readonly number: number;
  readonly title: string;
  readonly text: string;
  readonly tryThis: string;
  readonly formula: ComponentChildren;
  readonly python: ComponentChildren;
  readonly children: ComponentChildren;
}

export function Step(props: StepProps): JSX.Element {
  const { common } = useStrings();
  return (
    <section class="step" id={props.id} aria-labelledby={`${props.id}-title`}>
      <div class="words">
        <h2 id={`${props.id}-title`}>
          <span class="count" aria-hidden="true">
            {props.number}
          </span>
          {props.title}
        </h2>
        <Prose text={props.text} />
        {props.formula}
        <p class="try">
          <strong>{common.try}</strong> {props.tryThis}
        </p>
      </div>
      <div class="play">{props.children}</div>
      {props.python}
    </section>
  );
}
