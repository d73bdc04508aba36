// The page of a text: how much each token surprised the model, and what the whole comes to.

import type { JSX } from "preact";
import { useContext, useRef, useState } from "preact/hooks";
import type { Refused } from "../ask";
import { fill, useStrings } from "../i18n";
import { Models } from "../models";
import { Choice, Switch } from "../ui/controls";
import { Exports } from "../ui/export";
import { whole } from "../ui/format";
import { Status } from "../ui/status";
import { change, flag, integer, oneOf, text as textCodec, useParam } from "../url";
import { Drawer } from "./drawer";
import { scoreDocument, scoreLines, scoreTables } from "./export";
import { MOST_BYTES, readFile } from "./file";
import { Heat } from "./heat";
import { beginning, wellFormed } from "./keep";
import { LEVELS, legend, MEASURES, type Measure } from "./measures";
import { useScore } from "./score";
import { SumsView } from "./sums";
import { useKept } from "./useKept";
import { TokenTable, Worst } from "./worst";

export function TextPage(): JSX.Element {
  const { text: s } = useStrings();
  const models = useContext(Models);
  const known = models.map(({ name }) => name);
  const [name, setName] = useParam("model", oneOf(known[0] ?? "", known));
  const { text, held, key, to } = useKept("text", s.sample);
  const [file] = useParam("file", textCodec(""));
  const [by, setBy] = useParam("by", oneOf<Measure>("bits", MEASURES));
  const [numbers, setNumbers] = useParam("numbers", flag(false));
  const [at] = useParam("at", integer(0, 0, 1e9));
  const [problem, setProblem] = useState("");
  const input = useRef<HTMLInputElement>(null);
  const asked = useScore(name, text);
  const score = asked.failed || text === undefined ? undefined : asked.found;
  const model = models.find((one) => one.name === name);
  const open = score && at <= score.tokens.length ? at : 0;
  const setAt = (position: number): void => change({ ...to(text ?? ""), at: position ? String(position) : null });

  const take = (next: string, from: string): void => {
    setProblem("");
    change({ ...to(next), file: from || null, at: null });
  };
  const read = async (chosen: File | undefined): Promise<void> => {
    if (!chosen) return;
    const found = await readFile(chosen);
    const [size, most] = [chosen.size, MOST_BYTES].map((bytes) => whole(Math.ceil(bytes / 1024))) as [string, string];
    if ("text" in found) take(found.text, chosen.name);
    else setProblem(fill(s[found.problem], { file: chosen.name, size, most }));
  };

  return (
    <div class="next text">
      <header class="intro">
        <h1>{s.title}</h1>
        <p class="note">{fill(s.lead, { model: name })}</p>
      </header>
      {models.length > 1 ? (
        <Choice name="model" label={s.model} value={name} options={known.map((one) => [one, one] as const)} onChoose={setName} />
      ) : null}
      <form
        class="prompt"
        onSubmit={(event) => {
          event.preventDefault();
          const typed = wellFormed(event.currentTarget.querySelector("textarea")?.value ?? "");
          // A text field knows one kind of line end; a text that was not edited keeps its own.
          if (text === undefined || typed !== text.replace(/\r\n?/g, "\n")) take(typed, "");
          else if (asked.failed) asked.again();
        }}
        onDragOver={(event) => event.preventDefault()}
        onDrop={(event) => {
          if (!event.dataTransfer?.files.length) return;
          event.preventDefault();
          void read(event.dataTransfer.files[0]);
        }}
      >
        <label for="text">{file || s.label}</label>
        <textarea id="text" name="text" rows={4} key={key} spellcheck={false}>
          {text ?? ""}
        </textarea>
        <div class="controls buttons">
          <button type="submit">{s.score}</button>
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
        </div>
      </form>
      {held && text !== undefined ? <p class="note" data-chart="kept">{s.kept}</p> : null}
      {problem ? <p class="note alarm" role="alert">{problem}</p> : null}
      {held && text === undefined ? <p class="note alarm" role="alert">{s.lost}</p> : null}
      <Status asked={asked} waiting={s.waiting} />
      {asked.failed ? <Begin failed={asked.failed} onBegin={(share) => take(beginning(text ?? "", share), "")} /> : null}
      {score && model && text !== undefined ? (
        <>
          <section aria-label={s.summary}>
            <SumsView sums={score} />
            {score.scored_tokens > score.window ? (
              <p class="note">{fill(s.window, { window: whole(score.window), stride: whole(score.stride) })}</p>
            ) : null}
          </section>
          <div class="reading">
            <div class="mapped">
              <div class="controls measures">
                <Choice name="by" label={s.by} value={by} options={MEASURES.map((one) => [one, s.measures[one]] as const)} onChoose={setBy} />
                <Switch name="numbers" label={s.numbers} on={numbers} onFlip={setNumbers} />
              </div>
              <Legend by={by} />
              <Heat score={score} by={by} numbers={numbers} open={open} onOpen={(position) => setAt(position)} />
              <TokenTable score={score} />
            </div>
            <aside>
              {open ? <Drawer model={name} score={score} position={open} onClose={() => setAt(0)} /> : null}
              <Worst score={score} onOpen={(position) => setAt(position)} />
            </aside>
          </div>
          {asked.current ? (
            <Exports
              name="score"
              title={s.title}
              document={() => scoreDocument(model, score)}
              tables={() => scoreTables(score, { tokens: s.map, sums: s.summary })}
              charts='[data-chart="sums"], [data-chart="legend"], [data-chart="heat"], [data-chart="worst"]'
              lines={(where) => scoreLines(where(name), text, file, s.beside)}
            />
          ) : null}
        </>
      ) : null}
    </div>
  );
}

/** Where a text is too long: to read the part of it that is not. */
function Begin({ failed, onBegin }: { readonly failed: Refused; onBegin(share: number): void }): JSX.Element | null {
  const { text: s } = useStrings();
  const { most = 0, got = 0 } = failed.facts;
  if (failed.code !== "wrong_length" || got <= most) return null;
  return (
    <p class="note">
      {s.tooLong}{" "}
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
