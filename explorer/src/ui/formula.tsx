// Formulas in MathML, built from a few short functions.

import type { ComponentChildren, JSX } from "preact";

type M = ComponentChildren;

export const i = (name: string): JSX.Element => <mi>{name}</mi>;
export const n = (value: string | number): JSX.Element => <mn>{value}</mn>;
export const o = (sign: string): JSX.Element => <mo>{sign}</mo>;
export const row = (...parts: M[]): JSX.Element => <mrow>{parts}</mrow>;
export const frac = (top: M, bottom: M): JSX.Element => (
  <mfrac>
    <mrow>{top}</mrow>
    <mrow>{bottom}</mrow>
  </mfrac>
);
export const sub = (base: M, below: M): JSX.Element => (
  <msub>
    <mrow>{base}</mrow>
    <mrow>{below}</mrow>
  </msub>
);
export const sup = (base: M, above: M): JSX.Element => (
  <msup>
    <mrow>{base}</mrow>
    <mrow>{above}</mrow>
  </msup>
);
export const sqrt = (inside: M): JSX.Element => <msqrt>{inside}</msqrt>;
/** A comma and a wide space between two formulas. */
export const gap = (): JSX.Element => (
  <>
    <mo>,</mo>
    <mspace width="1em" />
  </>
);
/** A thin space, e.g. after the name of a function. */
export const space = (): JSX.Element => <mspace width="0.17em" />;
export const log = (of: M): JSX.Element => (
  <mrow>
    <mi>log</mi>
    {space()}
    {of}
  </mrow>
);
/** Σ or Π over an index. */
export const over = (sign: string, index: M): JSX.Element => (
  <munder>
    <mo>{sign}</mo>
    <mrow>{index}</mrow>
  </munder>
);

export function Formula({ children, label }: { children: M; label: string }): JSX.Element {
  return (
    <div class="formula">
      <math display="block" aria-label={label}>
        <mrow>{children}</mrow>
      </math>
    </div>
  );
}
