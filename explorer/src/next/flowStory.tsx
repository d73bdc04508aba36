// "How does this work?": the steps of a prediction in numbers.

import type { JSX } from "preact";
import type { Products } from "../api";
import { fill, useStrings } from "../i18n/strings";
import type { Processed } from "../sampler/process";
import type { Row } from "../sampler/row";
import { fixed, grouped, percent } from "../ui/format";
import { PageLink } from "../ui/pageLink";
import { TokenText, visible } from "../ui/tokenText";
import type { FlowProps } from "./flow";
import { chance } from "./rankedTokens";
import { FactRow, Heads } from "../ui/factsTable";

/** How many products are listed. */
const LARGEST = 5;

interface StoryProps extends FlowProps {
  readonly products: Products;
  readonly tokens: readonly number[];
}

export function Story({
  model,
  reading,
  processed,
  noise,
  seed,
  products,
  tokens,
  tokenText,
}: StoryProps): JSX.Element {
  const { how: s, common, next } = useStrings();
  const { row } = reading;
  const { hidden, weights, bias, scale, softcap } = products;
  const size = row.ids.length;
  const first = tokens[0] ?? 0;
  const terms = hidden
    .map((h, d) => ({ d, h, w: weights[0]?.[d] ?? 0, product: h * (weights[0]?.[d] ?? 0) }))
    .sort((a, b) => Math.abs(b.product) - Math.abs(a.product));
  const shown = terms.slice(0, LARGEST);
  const rest = terms.slice(LARGEST).reduce((sum, { product }) => sum + product, 0);
  const own = bias?.[0] ?? 0;
  const total = terms.reduce((sum, { product }) => sum + product, 0) + own;
  const best = row.logits[first] ?? 0;
  const position = reading.prompt.length;
  const left = processed.ids(tokens.length);
  return (
    <div class="story" id="how" data-chart="story">
      <p class="note">{s.lead}</p>
      <article>
        <h3>{s.s1}</h3>
        <p>
          {fill(s.t1, {
            model: model.name,
            n: grouped(position),
            d: grouped(hidden.length),
            low: fixed(Math.min(...hidden)),
            high: fixed(Math.max(...hidden)),
          })}
        </p>
      </article>
      <article>
        <h3>{s.s2}</h3>
        <p>{fill(s.t2, { d: grouped(hidden.length), token: visible(tokenText(first)) })}</p>
        <table class="facts" data-chart="terms">
          <Heads of={[s.index, "h", "w", s.product]} />
          <tbody>
            {shown.map(({ d, h, w, product }) => (
              <FactRow key={d} head={d + 1} cells={[fixed(h, 3), fixed(w, 3), fixed(product, 3)]} />
            ))}
            <tr>
              <th scope="row" colSpan={3}>
                {s.t2_rest}
              </th>
              <td>{fixed(rest, 3)}</td>
            </tr>
            {bias ? (
              <tr>
                <th scope="row" colSpan={3}>
                  {s.t2_bias}
                </th>
                <td>{fixed(own, 3)}</td>
              </tr>
            ) : null}
          </tbody>
          <tfoot>
            <tr data-sum={total} data-logit={best}>
              <th scope="row" colSpan={3}>
                {s.t2_sum}
              </th>
              <td>
                <strong>{fixed(total, 3)}</strong>
              </td>
            </tr>
          </tfoot>
        </table>
        {scale !== 1 || softcap !== null ? <p class="note">{s.t2_map}</p> : null}
      </article>
      <article>
        <h3>{s.s3}</h3>
        <p>{fill(s.t3, { n: grouped(size), total: fixed(row.candidates.total, 4) })}</p>
        <table class="facts">
          <Heads of={[common.token, "z − max", "eᶻ⁻ᵐᵃˣ", next.raw]} />
          <tbody>
            {tokens.map((id) => {
              const x = (row.logits[id] ?? 0) - best;
              return (
                <FactRow
                  key={id}
                  head={<TokenText text={tokenText(id)} />}
                  cells={[fixed(x, 3), fixed(Math.exp(x), 4), chance(row.probability[id] ?? 0)]}
                />
              );
            })}
          </tbody>
        </table>
      </article>
      <article>
        <h3>{s.s4}</h3>
        <p>
          {processed.steps.length
            ? fill(s.t4, {
                left: grouped(processed.kept),
                n: grouped(size),
                mass: percent(processed.steps.at(-1)?.mass ?? 1),
              })
            : fill(s.t4_none, { n: grouped(size) })}
        </p>
      </article>
      <article>
        <h3>{s.s5}</h3>
        <p>{fill(s.t5, { seed: String(seed), position: grouped(position) })}</p>
        <Sums ids={left} row={row} processed={processed} noise={noise} tokenText={tokenText} />
      </article>
      <p>
        <PageLink path="/learn">{s.learn}</PageLink>
      </p>
    </div>
  );
}

interface SumsProps {
  readonly ids: readonly number[];
  readonly row: Row;
  readonly processed: Processed;
  readonly noise: Float64Array;
  tokenText(id: number): string;
}

/** Logit, noise and sum of the best tokens and of the one that is drawn. */
function Sums({ ids, row, processed, noise, tokenText }: SumsProps): JSX.Element {
  const { how: s, common } = useStrings();
  const winner = row.ids[processed.draw(noise)] ?? 0;
  const shown = [...new Set([...ids, winner])];
  return (
    <table class="facts" data-chart="noise">
      <Heads of={[common.token, s.logit_left, s.noise, s.total]} />
      <tbody>
        {shown.map((id) => {
          const rank = row.rankOf(id);
          const [z, g] = [processed.logit(rank) ?? 0, noise[rank] ?? 0];
          return (
            <FactRow
              key={id}
              class={id === winner ? "hit" : undefined}
              head={<TokenText text={tokenText(id)} />}
              cells={[fixed(z, 3), fixed(g, 3), id === winner ? <strong>{fixed(z + g, 3)}</strong> : fixed(z + g, 3)]}
            />
          );
        })}
      </tbody>
    </table>
  );
}
