// The translation model of the run that was given: what its head predicts at each position.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { fetchRun, post, type Token } from "../api";
import { pyText } from "../export/quote";
import { fill, useStrings } from "../i18n/strings";
import { spell } from "../text/tokenSpelling";
import { chance } from "../next/rankedTokens";
import type { Answer } from "../train/trainingRun";
import { Bars } from "../ui/bars";
import { Slider } from "../ui/controls";
import { compact, grouped } from "../ui/format";
import { Code } from "../ui/prose";
import { Status } from "../ui/requestStatus";
import { integer, text as textCodec, useParam } from "../url";
import { useRequest } from "../useRequest";

type Predicted = Token & { readonly p: number };

interface Translated {
  readonly model: { name: string; parameters: number; vocab_size: number; hidden_size: number };
  readonly source: readonly Token[];
  readonly steps: readonly (Predicted & { readonly best: readonly Predicted[] })[];
  readonly text: string;
}

const MAX_TOKENS = 64;

/** The name of the run, if it trains a translation model. */
export function useTranslationRun(): string | undefined {
  const request = useRequest("run", (signal) => fetchRun<Answer>(undefined, signal));
  const run = request.data?.run;
  return run?.task === "translate" ? run.name : undefined;
}

export function TrainedTranslator({ run }: { readonly run: string }): JSX.Element {
  const { translation: s, common } = useStrings();
  const [sentence, setSentence] = useParam("sentence", textCodec(s.sample));
  const [place, setPlace] = useParam("place", integer(1, 1, MAX_TOKENS));
  const [typed, setTyped] = useState<string>();
  const request = useRequest(`translate ${sentence}`, async (signal): Promise<Translated> => {
    return (await (await post("/api/translate", { text: sentence }, signal)).json()) as Translated;
  });
  const found = request.data;
  return (
    <div class="panel translator" data-chart="translator" aria-busy={request.loading}>
      <form
        class="controls"
        onSubmit={(event) => {
          event.preventDefault();
          if (typed !== undefined) setSentence(typed);
          setTyped(undefined);
        }}
      >
        <label for="sentence">{fill(s.given, { run })}</label>
        <div class="line">
          <input
            id="sentence"
            name="sentence"
            type="text"
            spellcheck={false}
            value={typed ?? sentence}
            onInput={(event) => setTyped(event.currentTarget.value)}
          />
          <button type="submit">{s.translate}</button>
        </div>
      </form>
      <Status request={request} waiting={s.waiting} />
      {found && found.steps.length ? (
        <Steps found={found} place={Math.min(place, found.steps.length)} onPlace={(at) => setPlace(at, true)} />
      ) : null}
      <Code
        title={common.python}
        code={[
          "from lmhead.models import load_translator",
          "",
          `print(load_translator(${pyText(run)}).translate([${pyText(sentence)}], num_beams=1)[0][0].text)`,
        ].join("\n")}
      />
    </div>
  );
}

interface StepsProps {
  readonly found: Translated;
  /** The position that is shown, from 1. */
  readonly place: number;
  onPlace(place: number): void;
}

function Steps({ found, place, onPlace }: StepsProps): JSX.Element {
  const { translation: s, common, frame } = useStrings();
  const { model, source, steps, text } = found;
  const before = steps.slice(0, place - 1);
  const best = steps[place - 1]?.best ?? [];
  const chosen = steps[place - 1]?.id;
  return (
    <>
      <p class="note">
        {fill(frame.facts, { parameters: compact(model.parameters), vocab: grouped(model.vocab_size) })}
      </p>
      <dl class="reads">
        <dt>{s.source}</dt>
        <dd data-chart="source">
          <Pieces tokens={source} />
        </dd>
        <dt>{s.sofar}</dt>
        <dd data-chart="sofar">{before.length ? <Pieces tokens={before} /> : "—"}</dd>
      </dl>
      <Slider
        name="place"
        label={s.place}
        value={place}
        low={1}
        high={Math.max(2, steps.length)}
        step={1}
        shown={`${place} / ${steps.length}`}
        onMove={(at) => onPlace(Math.min(at, steps.length))}
      />
      <Bars
        name="predicted"
        caption={s.next}
        heads={[common.token, common.probability]}
        domain={[0, 1]}
        rows={best.map(({ p, ...token }) => ({
          head: spell([token])[0]?.shown ?? "",
          cells: [token.id === chosen ? <strong>{chance(p)}</strong> : chance(p)],
          value: p,
        }))}
      />
      <p>
        {s.whole}
        {common.colon}
        <strong data-chart="translated">{text}</strong>
      </p>
    </>
  );
}

function Pieces({ tokens }: { readonly tokens: readonly Token[] }): JSX.Element {
  return (
    <span class="pieces">
      {spell(tokens).map(({ shown }, at) => (
        <bdi key={at} class="piece">
          {shown}
        </bdi>
      ))}
    </span>
  );
}
