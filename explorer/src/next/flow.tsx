// A moving picture for this prompt: vector → dot products → logits → softmax → token.

import type { ComponentChildren, JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { fetchProducts, fetchWeights, type Model } from "../api";
import { fill, useStrings } from "../i18n/strings";
import type { Processed } from "../sampler/process";
import { Status } from "../ui/requestStatus";
import { fixed, grouped } from "../ui/format";
import { TokenText } from "../ui/tokenText";
import { flag, useParam } from "../url";
import { useRequest } from "../useRequest";
import { Story } from "./flowStory";
import { chance } from "./rankedTokens";
import type { Reading } from "./useNext";

/** How many tokens are shown, numbers of the vector, and products of a token. */
const SHOWN = 5;
const CELLS = 96;
const PRODUCTS = 32;
/** How long a setting rests before the weights of the token it draws are requested. */
const REST_MS = 150;

export interface FlowProps {
  readonly model: Model;
  readonly reading: Reading;
  readonly processed: Processed;
  readonly noise: Float64Array;
  readonly seed: number;
  /** The model's rank of the token that is drawn. */
  readonly drawn: number;
  tokenText(id: number): string;
}

/** The best tokens; the last gives way to the token that is drawn, if that is not among them. */
function shownTokens(best: readonly number[], winner: number): number[] {
  return best.includes(winner) ? [...best] : [...best.slice(0, -1), winner];
}

export function Flow(props: FlowProps): JSX.Element {
  const { how: s } = useStrings();
  const { model, reading, processed, drawn, tokenText } = props;
  const { row } = reading;
  const [open, setOpen] = useParam("how", flag(false));
  const [turn, setTurn] = useState(0);
  const ids = reading.prompt.map(({ id }) => id);
  const winner = row.ids[drawn] ?? 0;
  const best = [...row.ids.slice(0, SHOWN)];
  const tokens = shownTokens(best, winner);
  // For the best tokens and the one drawn when the prompt was read: a setting, which may draw another one, does not
  // run the model again.
  const first = useMemo(() => [...new Set([...best, winner])], [reading]);
  const request = useRequest(`products ${JSON.stringify([model.name, ids, first])}`, (signal) =>
    fetchProducts({ model: model.name, ids, tokens: first }, signal),
  );
  const products = request.current ? request.data : undefined;
  const later = useRequest(
    first.includes(winner) ? undefined : `weights ${JSON.stringify([model.name, winner])}`,
    (signal) => fetchWeights({ model: model.name, tokens: [winner] }, signal),
    REST_MS,
  );
  const weightsOf = (id: number): readonly number[] | undefined =>
    first.includes(id) ? products?.weights[first.indexOf(id)] : later.current ? later.data?.weights[0] : undefined;
  const logits = tokens.map((id) => row.logits[id] ?? 0);
  const widest = Math.max(...logits.map(Math.abs), 1e-9);
  return (
    <section class="flow" aria-label={s.picture}>
      <div class="flow-picture" key={`${turn} ${ids.join()}`} data-chart="flow" role="img" aria-label={s.picture}>
        <Part
          title={s.vector}
          note={fill(model.hidden_size > CELLS ? s.vector_part : s.vector_note, {
            n: grouped(model.hidden_size),
            shown: CELLS,
          })}
        >
          <VectorCells hidden={products?.hidden} />
        </Part>
        <Part title={s.dots} note={fill(s.dots_note, { n: Math.min(PRODUCTS, model.hidden_size) })}>
          {tokens.map((id) => (
            <div key={id} class={id === winner ? "flow-row drawn" : "flow-row"}>
              <TokenText text={tokenText(id)} />
              <MiniRow weights={weightsOf(id)} hidden={products?.hidden} />
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
            <TokenText text={tokenText(winner)} />
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
      {request.error ? <Status request={request} waiting="" /> : null}
      {later.error ? <Status request={later} waiting="" /> : null}
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
  const max = Math.max(...shown.map(Math.abs), 1e-9);
  return (
    <div class="flow-cells" aria-hidden="true">
      {shown.map((x, d) => (
        <i key={d} class={x < 0 ? "down" : "up"} style={{ opacity: Math.abs(x) / max }} />
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
  const products = (weights ?? []).slice(0, PRODUCTS).map((w, d) => w * (hidden?.[d] ?? 0));
  const max = Math.max(...products.map(Math.abs), 1e-9);
  return (
    <span class="flow-cells line" aria-hidden="true">
      {products.map((x, d) => (
        <i key={d} class={x < 0 ? "down" : "up"} style={{ opacity: Math.abs(x) / max }} />
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
