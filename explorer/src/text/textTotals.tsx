// Totals of the whole text.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { fixed, percent, grouped } from "../ui/format";
import type { Sums } from "./score";

export function TextTotals({ sums }: { sums: Sums }): JSX.Element {
  const { text: s } = useStrings();
  const [tokens, bytes] = [grouped(sums.scored_tokens), grouped(sums.scored_bytes)];
  const facts: [string, number | null, string, string][] = [
    ["perplexity", sums.perplexity, fixed(sums.perplexity ?? Infinity, 2), s.notes.perplexity],
    ["bits_per_byte", sums.bits_per_byte, fixed(sums.bits_per_byte ?? Infinity, 3), s.notes.bits_per_byte],
    [
      "bits_per_token",
      sums.bits_per_token,
      fixed(sums.bits_per_token ?? Infinity, 3),
      fill(s.notes.bits_per_token, { tokens, bytes }),
    ],
    ["entropy", sums.entropy / Math.LN2, fixed(sums.entropy / Math.LN2, 3), s.notes.entropy],
    ["first_choices", sums.first_choices, percent(sums.first_choices), s.notes.first_choices],
    ["in_top_10", sums.in_top_10, percent(sums.in_top_10), s.notes.in_top_10],
  ];
  return (
    <dl class="sums" data-chart="sums">
      {facts.map(([name, value, shown, note]) => (
        <div key={name}>
          <dt>{s.sums[name as keyof typeof s.sums]}</dt>
          <dd data-sum={name} data-value={value ?? "Infinity"}>
            {shown}
          </dd>
          <dd class="note">{note}</dd>
        </div>
      ))}
    </dl>
  );
}
