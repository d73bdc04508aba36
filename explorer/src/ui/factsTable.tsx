// Parts of tables: the row of column headings, and a row of a heading and cells.

import type { ComponentChildren, JSX } from "preact";

/** A heading, or a heading and its class. */
type Head = string | readonly [head: string, className: string];

/** The column headings; "" is an empty cell. With `bar`, a cell above the bars comes last. */
export function Heads({ of, bar }: { of: readonly Head[]; bar?: boolean }): JSX.Element {
  return (
    <thead>
      <tr>
        {of.map((head, i) => {
          if (head === "") return <td key={i} />;
          const [text, name] = typeof head === "string" ? [head, ""] : head;
          return (
            <th key={i} scope="col" class={name || undefined}>
              {text}
            </th>
          );
        })}
        {bar ? <td class="bar" /> : null}
      </tr>
    </thead>
  );
}

interface FactRowProps {
  readonly class?: string | undefined;
  readonly head: ComponentChildren;
  readonly cells: readonly ComponentChildren[];
}

/** A row; further attributes, such as `data-value`, are those of the row. */
export function FactRow({ head, cells, ...attributes }: FactRowProps): JSX.Element {
  return (
    <tr {...attributes}>
      <th scope="row">{head}</th>
      {cells.map((cell, i) => (
        <td key={i}>{cell}</td>
      ))}
    </tr>
  );
}
