// The Text page: the surprisal of each token, and totals.

import type { JSX } from "preact";
import { useContext, useRef, useState } from "preact/hooks";
import type { ServerError } from "../api";
import { fill, useStrings } from "../i18n/strings";
import { Models } from "../models";
import { Choice, Switch } from "../ui/controls";
import { ExportPanel } from "../ui/exportPanel";
import { grouped } from "../ui/format";
import { PromptForm, useDraft } from "../ui/promptForm";
import { Alarm, Inline } from "../ui/prose";
import { Status } from "../ui/requestStatus";
import { change, flag, integer, oneOf, text as textCodec, useParam } from "../url";
import { Drawer } from "./alternatives";
import { scoreDocument, scoreLines, scoreLive, scoreTables } from "./textExport";
import { MAX_BYTES, readFile } from "./readFile";
import { Heat } from "./heatMap";
import { beginning, wellFormed } from "./storedText";
import { LEVELS, legend, MEASURES, type Measure } from "./textMeasures";
import { useScore } from "./score";
import { TextTotals } from "./textTotals";
import { usePromptParam } from "./usePromptParam";
import { TokenTable, MostSurprising } from "./surprises";

export function TextPage(): JSX.Element {
  const { text: s, common } = useStrings();
  const models = useContext(Models);
  const known = models.map(({ name }) => name);
  const [name] = useParam("model", oneOf(known[0] ?? "", known));
  const model = models.find((one) => one.name === name);
  const field = usePromptParam(model);
  const { text, held, to } = field;
  const draft = useDraft(field);
  const [file] = useParam("file", textCodec(""));
  const [by, setBy] = useParam("by", oneOf<Measure>("bits", MEASURES));
  const [numbers, setNumbers] = useParam("numbers", flag(false));
  const [at] = useParam("at", integer(0, 0, 1e9));
  const [problem, setProblem] = useState("");
  const input = useRef<HTMLInputElement>(null);
  const request = useScore(name, text);
  const score = (request.error && !request.current) || text === undefined ? undefined : request.data;
  const open = score && at <= score.tokens.length ? at : 0;
  const setAt = (position: number): void => change({ ...to(text ?? ""), at: position ? String(position) : null });

  const take = (next: string, from: string): void => {
    setProblem("");
    draft.set(undefined);
    change({ ...to(next), file: from || null, at: null });
  };
  const read = async (chosen: File | undefined): Promise<void> => {
    if (!chosen) return;
    const found = await readFile(chosen);
    const [size, most] = [chosen.size, MAX_BYTES].map((bytes) => grouped(Math.ceil(bytes / 1024))) as [string, string];
    if ("text" in found) take(found.text, chosen.name);
    else setProblem(fill(s[found.problem], { file: chosen.name, size, most }));
  };

  return (
    <div class="next text">
      <header class="intro">
        <h1>{s.title}</h1>
        <p class="note">{fill(s.lead, { model: name })}</p>
      </header>
      <div
        onDragOver={(event) => event.preventDefault()}
        onDrop={(event) => {
          if (!event.dataTransfer?.files.length) return;
          event.preventDefault();
          void read(event.dataTransfer.files[0]);
        }}
      >
        <PromptForm
          name="text"
          label={file || s.label}
          button={s.score}
          rows={3}
          draft={draft}
          onSubmit={(typed) => {
            if (wellFormed(typed) !== text) take(typed, "");
            else if (request.error) request.retry();
          }}
        >
          <button type="button" data-do="open" onClick={() => input.current?.click()}>
            {s.open}
          </button>
          <input
            ref={input}
            type="file"
            class="unseen"
            tabIndex={-1}
            aria-hidden="true"
            accept="text/*,.txt,.md,.csv,.json,.py"
            onChange={(event) => {
              void read(event.currentTarget.files?.[0]);
              event.currentTarget.value = ""; // the same file may be opened again
            }}
          />
        </PromptForm>
      </div>
      {held && text !== undefined ? (
        <p class="note" data-chart="kept">
          {s.kept}
        </p>
      ) : null}
      {problem ? <Alarm>{problem}</Alarm> : null}
      {held && text === undefined ? <Alarm>{s.textUnavailable}</Alarm> : null}
      <Status request={request} waiting={s.waiting} />
      {request.error ? (
        <Begin failed={request.error} onBegin={(share) => take(beginning(text ?? "", share), "")} />
      ) : null}
      {score && model && text !== undefined ? (
        <div class={request.current && !draft.edited ? "" : "stale"}>
          <div class="reading">
            <div class="mapped">
              <div class="controls measures">
                <Choice
                  name="by"
                  label={s.by}
                  value={by}
                  options={MEASURES.map((one) => [one, s.measures[one]] as const)}
                  onChoose={setBy}
                />
                <Switch name="numbers" label={s.numbers} on={numbers} onFlip={setNumbers} />
              </div>
              <Legend by={by} />
              <Heat score={score} by={by} numbers={numbers} open={open} onOpen={(position) => setAt(position)} />
              <TokenTable score={score} />
            </div>
            <aside>
              {open ? <Drawer model={name} score={score} position={open} onClose={() => setAt(0)} /> : null}
              <MostSurprising score={score} onOpen={(position) => setAt(position)} />
            </aside>
          </div>
          <section aria-label={s.summary}>
            <TextTotals sums={score} />
            {score.scored_tokens > score.window ? (
              <p class="note">{fill(s.window, { window: grouped(score.window), stride: grouped(score.stride) })}</p>
            ) : null}
          </section>
          {request.current && !request.loading ? (
            <ExportPanel
              name="score"
              title={s.title}
              document={() => scoreDocument(model, score)}
              tables={() => scoreTables(score, { tokens: s.map, sums: s.summary })}
              charts='[data-chart="sums"], [data-chart="legend"], [data-chart="heat"], [data-chart="worst"]'
              live={() => scoreLive(score, by, s)}
              besideLive='[data-chart="sums"], [data-chart="worst"]'
              about={{ models: [name], prompt: text, settings: `${s.by}${common.colon}${s.measures[by]}` }}
              lines={(where) => scoreLines(where(name), text, file, s.beside)}
            />
          ) : null}
        </div>
      ) : null}
    </div>
  );
}

/** For a text that is too long: a button to score the part that fits. */
function Begin({
  failed,
  onBegin,
}: {
  readonly failed: ServerError;
  onBegin(share: number): void;
}): JSX.Element | null {
  const { text: s } = useStrings();
  const { most = 0, got = 0 } = failed.facts;
  if (failed.code !== "wrong_length" || got <= most) return null;
  return (
    <p class="note">
      <Inline text={s.tooLong} />{" "}
      <button type="button" data-do="begin" onClick={() => onBegin((0.95 * most) / got)}>
        {s.begin}
      </button>
    </p>
  );
}

function Legend({ by }: { by: Measure }): JSX.Element {
  const { text: s } = useStrings();
  const ranges = legend(by);
  return (
    <figure class="levels" data-chart="legend">
      <figcaption>{s.scales[by]}</figcaption>
      <ol>
        {Array.from({ length: LEVELS }, (_, at) => (
          <li key={at} class={`level-${at}`}>
            {ranges[at]}
          </li>
        ))}
      </ol>
    </figure>
  );
}
