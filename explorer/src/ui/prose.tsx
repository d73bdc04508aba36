// Text with **strong** parts and `commands`, and code with a button that copies it.

import type { ComponentChildren, JSX } from "preact";
import { useState } from "preact/hooks";
import { runnable } from "../export/runnable";
import { useStrings } from "../i18n/strings";

/** A text whose **strong** parts are bold and whose `commands` are code. */
export function Inline({ text }: { text: string }): JSX.Element {
  const parts = text.split(/(\*\*.*?\*\*|`.*?`)/);
  return (
    <>
      {parts.map((part, i) => {
        if (part.startsWith("**")) return <strong key={i}>{part.slice(2, -2)}</strong>;
        return part.startsWith("`") ? <code key={i}>{part.slice(1, -1)}</code> : part;
      })}
    </>
  );
}

export function Prose({ text }: { text: string }): JSX.Element {
  return (
    <p>
      <Inline text={text} />
    </p>
  );
}

/** An error or warning, read aloud at once. */
export function Alarm({ children }: { children: ComponentChildren }): JSX.Element {
  return (
    <p class="note alarm" role="alert">
      {children}
    </p>
  );
}

/** Python code. `values` are the results of its expressions, in order; a test runs the code and compares. */
export function Python({ code, values }: { code: string; values: readonly unknown[] }): JSX.Element {
  const { common } = useStrings();
  return <Code title={common.python} code={code} values={values} />;
}

/** Code with a copy button. */
export function Code({
  title,
  code,
  values,
}: {
  title: string;
  code: string;
  values?: readonly unknown[];
}): JSX.Element {
  const { common } = useStrings();
  const [copied, setCopied] = useState(false);
  const copy = (): void => {
    void navigator.clipboard?.writeText(values ? runnable(code) : code).then(() => {
      setCopied(true);
      setTimeout(() => setCopied(false), 1500);
    });
  };
  return (
    <figure class="python">
      <figcaption>
        {title}
        <button type="button" class="quiet" onClick={copy}>
          {copied ? common.copied : common.copy}
        </button>
      </figcaption>
      <pre tabIndex={0}>
        <code data-values={values && JSON.stringify(values, nameOddNumbers)}>{code}</code>
      </pre>
    </figure>
  );
}

function nameOddNumbers(_: string, value: unknown): unknown {
  return typeof value === "number" && !Number.isFinite(value) ? String(value) : value;
}
