// The explanation for two models with different vocabularies.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { visible } from "../ui/tokenText";
import { grouped } from "../ui/format";
import type { Different } from "./useCompare";

export function DifferentVocabularies({ different }: { different: Different }): JSX.Element {
  const { comparing: s } = useStrings();
  const { reason, place } = different;
  const [a, b] = [different.a, different.b].map((value) => {
    if (typeof value === "number") return reason === "sizes" ? grouped(value) : String(value);
    return reason === "token" ? `“${visible(value)}”` : value;
  }) as [string, string];
  return (
    <section class="panel different" data-chart="different" data-reason={reason}>
      <h2>{s.different.title}</h2>
      <p>{fill(s.different[reason], { a, b, place: reason === "cut" ? (place ?? 0) + 1 : (place ?? 0) })}</p>
      <p>{s.different.why}</p>
    </section>
  );
}
