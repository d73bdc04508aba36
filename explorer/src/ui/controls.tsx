// Form controls: sliders, switches, choices, number fields. All are native elements.

import type { JSX } from "preact";
import { useId, useState } from "preact/hooks";
import { fill, useStrings } from "../i18n/strings";
import { grouped } from "./format";

interface SliderProps {
  readonly label: string;
  readonly value: number;
  readonly low: number;
  readonly high: number;
  /** 1 if not given. */
  readonly step?: number;
  readonly name: string;
  readonly shown?: string;
  /** An accessible name, where no label is shown. */
  readonly aria?: string;
  onMove(value: number): void;
}

/** The range input of a slider. */
export function Range(props: Omit<SliderProps, "label"> & { readonly id: string }): JSX.Element {
  const { id, value, low, high, step = 1, name, shown, aria, onMove } = props;
  return (
    <input
      id={id}
      name={name}
      aria-label={aria}
      type="range"
      min={low}
      max={high}
      step={step}
      value={value}
      aria-valuetext={shown ?? String(value)}
      onInput={(event) => onMove(event.currentTarget.valueAsNumber)}
    />
  );
}

export function Slider({ label, ...range }: SliderProps): JSX.Element {
  const id = useId();
  return (
    <div class="slider">
      {label ? <label for={id}>{label}</label> : null}
      <Range id={id} {...range} />
      <output for={id}>{range.shown ?? range.value}</output>
    </div>
  );
}

interface SwitchProps {
  readonly label: string;
  readonly on: boolean;
  readonly name: string;
  onFlip(on: boolean): void;
}

export function Switch({ label, on, name, onFlip }: SwitchProps): JSX.Element {
  return (
    <label class="switch">
      <input
        type="checkbox"
        role="switch"
        name={name}
        checked={on}
        onChange={(event) => onFlip(event.currentTarget.checked)}
      />
      <span>{label}</span>
    </label>
  );
}

interface ChoiceProps<T extends string> {
  readonly label: string;
  readonly value: T;
  readonly name: string;
  readonly options: readonly (readonly [T, string])[];
  onChoose(value: T): void;
}

export function Choice<T extends string>(props: ChoiceProps<T>): JSX.Element {
  const { label, value, name, options, onChoose } = props;
  const group = useId();
  return (
    <fieldset class="choice">
      <legend>{label}</legend>
      <div class="segments">
        {options.map(([option, text]) => (
          <label key={option}>
            <input
              type="radio"
              name={`${name}-${group}`}
              value={option}
              checked={option === value}
              onChange={() => onChoose(option)}
            />
            <span>{text}</span>
          </label>
        ))}
      </div>
    </fieldset>
  );
}

/** The options of a `Choice` that `texts` has names for. */
export function optionsOf<T extends string>(texts: Readonly<Record<T, string>>, ...keys: T[]): [T, string][] {
  return keys.map((key) => [key, texts[key]]);
}

interface NumberProps {
  readonly value: number;
  readonly low: number;
  readonly high: number;
  readonly name: string;
  readonly id?: string;
  /** Accept fractions; integers only if not given. */
  readonly fractions?: boolean;
  /** An accessible name, where no label is shown. */
  readonly aria?: string;
  onSet(value: number): void;
}

/** A number field that reports an out-of-range value; when left, it shows the value in use again. */
export function NumberInput({ value, low, high, name, id, fractions, aria, onSet }: NumberProps): JSX.Element {
  const { common } = useStrings();
  const [wrong, setWrong] = useState<string>();
  const why = useId();
  const bad = wrong !== undefined;
  return (
    <>
      <input
        id={id}
        name={name}
        aria-label={aria}
        aria-invalid={bad}
        aria-describedby={bad ? why : undefined}
        type="number"
        min={low}
        max={high}
        step={fractions ? "any" : 1}
        value={wrong ?? String(value)} // as text, so that the caret stays where it is
        onInput={({ currentTarget: { value: typed, valueAsNumber: next } }) => {
          const fits = (fractions ? Number.isFinite(next) : Number.isInteger(next)) && next >= low && next <= high;
          setWrong(fits ? undefined : typed);
          if (fits && next !== value) onSet(next);
        }}
        onBlur={(event) => {
          setWrong(undefined);
          event.currentTarget.value = String(value); // also replaces text that is not a number
        }}
      />
      {bad ? (
        <p id={why} class="note alarm wrong" role="alert">
          {fill(fractions ? common.number_range : common.range, { low: grouped(low), high: grouped(high) })}
        </p>
      ) : null}
    </>
  );
}

export function NumberField({ label, ...field }: NumberProps & { readonly label: string }): JSX.Element {
  const id = useId();
  return (
    <div class="number">
      <label for={id}>{label}</label>
      <NumberInput {...field} id={id} />
    </div>
  );
}

/** A slider with a number field beside it, for exact values. */
export function SliderField({ label, ...range }: SliderProps): JSX.Element {
  const id = useId();
  const { name, value, low, high, step = 1, onMove } = range;
  const exact = { name: `${name}-exact`, aria: label, value, low, high };
  return (
    <div class="slider exact">
      <label for={id}>{label}</label>
      <Range id={id} {...range} />
      <NumberInput {...exact} fractions={step !== 1} onSet={onMove} />
    </div>
  );
}
