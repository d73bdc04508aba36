// A moving picture for this prompt: vector → dot products → logits → softmax → token, with the steps in numbers.

import type { ComponentChildren, JSX } from "preact";
import { useState } from "preact/hooks";
import { fetchProducts, type Model, type Products } from "../api";
import { fill, useStrings } from "../i18n/strings";
import type { Processed } from "../sampler/process";
import type { Row } from "../sampler/row";
import { PageLink } from "../ui/pageLink";
import { Status } from "../ui/requestStatus";
import { fixed, grouped, percent } from "../ui/format";
import { TokenText, visible } from "../ui/tokenText";
import { flag, useParam } from "../url";
import { useRequest } from "../useRequest";
import { chance } from "./rankedTokens";
import type { Reading } from "./useNext";

const [SHOWN, CELLS, LARGEST] = [5, 96, 5];

interface FlowProps {
  readonly model: Model;
  readonly reading: Reading;
  readonly processed: Processed;
  readonly noise: Float64Array;
  readonly seed: number;
  /** The model's rank of the token that is drawn. */
  readonly drawn: number;
  say(id: number): string;
}

/** The best tokens; the last gives way to the token that is drawn, if that is not among them. */
function shownTokens(best: readonly number[], winner: number): number[] {
  return best.includes(winner) ? [...best] : [...best.slice(0, -1), winner];
}

export function Flow(props: FlowProps): JSX.Element {
  const { how: s } = useStrings();
  const { model, reading, processed, drawn, say } = props;
  const { row } = reading;
  const [open, setOpen] = useParam("how", flag(false));
  const [turn, setTurn] = useState(0);
  const ids = reading.prompt.map(({ id }) => id);
  const winner = row.ids[drawn] ?? 0;
  // Requested for the best tokens only: the drawn one follows the sliders, which send no request.
  const best = [...row.ids.slice(0, SHOWN)];
  const tokens = shownTokens(best, winner);
  const request = useRequest(`products ${JSON.stringify([model.name, ids, best])}`, (signal) =>
    fetchProducts({ model: model.name, ids, tokens: best }, signal),
  );
  const products = request.current ? request.data : undefined;
  const logits = tokens.map((id) => row.logits[id] ?? 0);
  const widest = Math.max(...logits.map(Math.abs), 1e-9);
  return (
    <section class="flow" aria-label={s.picture}>
      <div class="flow-picture" key={`${turn} ${ids.join()}`} data-chart="flow" role="img" aria-label={s.picture}>
        <Part title={s.vector} note={fill(s.vector_note, { n: grouped(model.hidden_size) })}>
          <VectorCells hidden={products?.hidden} />
        </Part>
        <Part title={s.dots} note={s.dots_note}>
          {tokens.map((id) => (
            <div key={id} class={id === winner ? "flow-row drawn" : "flow-row"}>
              <TokenText text={say(id)} />
              <MiniRow weights={products?.weights[best.indexOf(id)]} hidden={products?.hidden} />
            </div>
          ))}
        </Part>
        <Part title={s.logits} note="z">
          {logits.map((z, at) => (
            <Bar key={at} share={Math.abs(z) / widest} text={fixed(z)} negative={z < 0} drawn={tokens[at] === winner} />
          ))}
        </Part>
        <Part title={s.softmax} note={s.softmax_note}>
          {tokens.map((id) => (
            <Bar key={id} share={processed.pOf(id)} text={chance(processed.pOf(id))} drawn={id === winner} />
          ))}
        </Part>
        <Part title={s.token} note="">
          <strong class="flow-token" data-chart="flow-token">
            <TokenText text={say(winner)} />
          </strong>
        </Part>
      </div>
      <div class="controls buttons">
        <button type="button" data-do="how" aria-expanded={open} aria-controls="how" onClick={() => setOpen(!open)}>
          {s.title}
        </button>
        <button type="button" class="quiet" data-do="replay" onClick={() => setTurn(turn + 1)}>
          {s.replay}
        </button>
      </div>
      {request.error ? <Status asked={request} waiting="" /> : null}
      {open && products ? <Story {...props} products={products} tokens={best} /> : null}
    </section>
  );
}

function Part({ title, note, children }: { title: string; note: string; children: ComponentChildren }): JSX.Element {
  return (
    <div class="flow-part">
      <h3>
        {title} <small>{note}</small>
      </h3>
      {children}
    </div>
  );
}

/** The first numbers of the vector as colored cells. */
function VectorCells({ hidden }: { readonly hidden: readonly number[] | undefined }): JSX.Element {
  const shown = (hidden ?? Array.from({ length: CELLS }, () => 0)).slice(0, CELLS);
  const most = Math.max(...shown.map(Math.abs), 1e-9);
  return (
    <div class="flow-cells" aria-hidden="true">
      {shown.map((x, d) => (
        <i key={d} class={x < 0 ? "down" : "up"} style={{ opacity: Math.abs(x) / most }} />
      ))}
    </div>
  );
}

/** Products of the first numbers with the weights of one token. */
function MiniRow({
  weights,
  hidden,
}: {
  readonly weights: readonly number[] | undefined;
  readonly hidden: readonly number[] | undefined;
}): JSX.Element {
  const products = (weights ?? []).slice(0, 32).map((w, d) => w * (hidden?.[d] ?? 0));
  const most = Math.max(...products.map(Math.abs), 1e-9);
  return (
    <span class="flow-cells line" aria-hidden="true">
      {products.map((x, d) => (
        <i key={d} class={x < 0 ? "down" : "up"} style={{ opacity: Math.abs(x) / most }} />
      ))}
    </span>
  );
}

interface BarProps {
  readonly share: number;
  readonly text: string;
  readonly negative?: boolean;
  /** Whether this token is the one that is drawn. */
  readonly drawn: boolean;
}

function Bar({ share, text, negative, drawn }: BarProps): JSX.Element {
  return (
    <div class={drawn ? "flow-row drawn" : "flow-row"}>
      <span class="track" aria-hidden="true">
        <span class={`fill ${negative ? "down" : "plain"}`} style={{ left: 0, width: `${100 * share}%` }} />
      </span>
      <span class="figure">{text}</span>
    </div>
  );
}

interface StoryProps extends FlowProps {
  readonly products: Products;
  readonly tokens: readonly number[];
}

function Story({ model, reading, processed, noise, seed, products, tokens, say }: StoryProps): JSX.Element {
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
  const left = [...processed.left.ids.slice(0, SHOWN)];
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
        <p>{fill(s.t2, { d: grouped(hidden.length), token: visible(say(first)) })}</p>
        <table class="facts" data-chart="terms">
          <thead>
            <tr>
              <th scope="col">{s.index}</th>
              <th scope="col">h</th>
              <th scope="col">w</th>
              <th scope="col">{s.product}</th>
            </tr>
          </thead>
          <tbody>
            {shown.map(({ d, h, w, product }) => (
              <tr key={d}>
                <th scope="row">{d + 1}</th>
                <td>{fixed(h, 3)}</td>
                <td>{fixed(w, 3)}</td>
                <td>{fixed(product, 3)}</td>
              </tr>
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
          <thead>
            <tr>
              <th scope="col">{common.token}</th>
              <th scope="col">z − max</th>
              <th scope="col">eᶻ⁻ᵐᵃˣ</th>
              <th scope="col">{next.raw}</th>
            </tr>
          </thead>
          <tbody>
            {tokens.map((id) => {
              const x = (row.logits[id] ?? 0) - best;
              return (
                <tr key={id}>
                  <th scope="row">
                    <TokenText text={say(id)} />
                  </th>
                  <td>{fixed(x, 3)}</td>
                  <td>{fixed(Math.exp(x), 4)}</td>
                  <td>{chance(row.probability[id] ?? 0)}</td>
                </tr>
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
        <Sums ids={left} row={row} processed={processed} noise={noise} say={say} />
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
  say(id: number): string;
}

/** Logit, noise and sum of the best tokens and of the one that is drawn. */
function Sums({ ids, row, processed, noise, say }: SumsProps): JSX.Element {
  const { how: s, common } = useStrings();
  const winner = row.ids[processed.draw(noise)] ?? 0;
  const logit = new Map(Array.from(processed.left.ids, (id, at) => [id, processed.left.z[at] ?? 0]));
  const shown = [...new Set([...ids, winner])];
  return (
    <table class="facts" data-chart="noise">
      <thead>
        <tr>
          <th scope="col">{common.token}</th>
          <th scope="col">{s.logit_left}</th>
          <th scope="col">{s.noise}</th>
          <th scope="col">{s.total}</th>
        </tr>
      </thead>
      <tbody>
        {shown.map((id) => {
          const [z, g] = [logit.get(id) ?? 0, noise[id] ?? 0];
          return (
            <tr key={id} class={id === winner ? "hit" : undefined}>
              <th scope="row">
                <TokenText text={say(id)} />
              </th>
              <td>{fixed(z, 3)}</td>
              <td>{fixed(g, 3)}</td>
              <td>{id === winner ? <strong>{fixed(z + g, 3)}</strong> : fixed(z + g, 3)}</td>
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}
