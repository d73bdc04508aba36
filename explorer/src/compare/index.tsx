// The page that puts two models, or two samplers, side by side: on one next word, or along a text.

import type { JSX } from "preact";
import { useContext } from "preact/hooks";
import { useStrings } from "../i18n";
import { Models } from "../models";
import { Choice } from "../ui/controls";
import { Prose } from "../ui/prose";
import { Status } from "../ui/status";
import { useKept } from "../text/useKept";
import { change, oneOf, useParam } from "../url";
import { AlongResult } from "./along";
import { DifferentNote } from "./different";
import type { Sides } from "./export";
import { PromptResult } from "./prompt";
import { ModelSide, SamplerSide } from "./side";
import { libraryOptions, swapped } from "./sides";
import { useAlong, useRows } from "./useCompare";
import { useSampler } from "./useSampler";

export function ComparePage(): JSX.Element {
  const { comparing: s, text: { lost } } = useStrings();
  const models = useContext(Models);
  const known = models.map(({ name }) => name);
  const [first = "", second = first] = known;
  const [wanted, setWhat] = useParam("what", oneOf(second === first ? "samplers" : "models", ["models", "samplers"] as const));
  const what = known.length > 1 ? wanted : "samplers";
  const [where, setWhere] = useParam("where", oneOf("prompt", ["prompt", "text"] as const));
  const [a] = useParam("a", oneOf(first, known));
  const [b] = useParam("b", oneOf(second, known));
  const prompt = useKept("prompt", s.promptSample, "held_prompt");
  const along = useKept("text", s.textSample);
  const one = useSampler("a");
  const two = useSampler("b");
  const samplers = what === "samplers";
  const onText = where === "text";

  const other = samplers ? a : b;
  const field = onText ? along : prompt;
  const rows = useRows(!onText && prompt.text !== undefined, a, other, prompt.text ?? "");
  const question = samplers
    ? { a, sampler_a: libraryOptions(one.options), sampler_b: libraryOptions(two.options), text: along.text }
    : { a, b, text: along.text };
  const walked = useAlong(onText && along.text !== undefined ? question : undefined);
  const asked = onText ? walked : rows;
  const found = asked.failed || field.text === undefined ? undefined : asked.found;
  const [modelA, modelB] = [a, other].map((name) => models.find((model) => model.name === name));
  const sides: Sides | undefined = modelA && modelB && { models: [modelA, modelB], samplers: samplers ? [one.options, two.options] : undefined };
  const swap = (): void => change(samplers ? swapped(one.options, two.options) : { a: b, b: a });

  return (
    <div class="compare">
      <header class="intro">
        <h1>{s.title}</h1>
        <Prose text={s.lead} />
      </header>
      <div class="settings-row">
        {known.length > 1 ? (
          <Choice name="what" label={s.what} value={what} options={[["models", s.models], ["samplers", s.samplers]] as const} onChoose={setWhat} />
        ) : null}
        <Choice name="where" label={s.where} value={where} options={[["prompt", s.onPrompt], ["text", s.onText]] as const} onChoose={setWhere} />
        {samplers && known.length > 1 ? (
          <Choice name="model" label={s.model} value={a} options={known.map((name) => [name, name] as const)} onChoose={(name) => change({ a: name })} />
        ) : null}
      </div>
      {known.length > 1 ? null : <p class="note">{s.one}</p>}
      <div class="sides">
        {samplers ? (
          <>
            <SamplerSide side="a" sampler={one} />
            <SamplerSide side="b" sampler={two} />
          </>
        ) : (
          <>
            <ModelSide side="a" value={a} known={known} onChoose={(name) => change({ a: name })} />
            <ModelSide side="b" value={b} known={known} onChoose={(name) => change({ b: name })} />
          </>
        )}
      </div>
      <button type="button" class="quiet swap" data-do="swap" onClick={swap}>
        {s.swap}
      </button>
      <form
        class="prompt"
        key={where}
        onSubmit={(event) => {
          event.preventDefault();
          const said = String(new FormData(event.currentTarget).get("said"));
          if (asked.failed && said === field.text) asked.again();
          else change({ ...field.to(said), at: null });
        }}
      >
        <label for="said">{onText ? s.text : s.prompt}</label>
        <textarea id="said" name="said" rows={onText ? 4 : 2} key={field.key}>
          {field.text}
        </textarea>
        <button type="submit">{s.go}</button>
      </form>
      {field.text === undefined ? <p class="note alarm" role="alert">{lost}</p> : null}
      <Status asked={asked} waiting={s.waiting} />
      {found?.comparable === false ? <DifferentNote different={found} /> : null}
      {sides && found?.comparable && "rows" in found && found.models.join() === [a, other].join() ? (
        <PromptResult found={found} sides={sides} said={prompt.text ?? ""} settled={asked.current} />
      ) : null}
      {sides && found?.comparable && "places" in found ? (
        <AlongResult found={found} sides={sides} said={along} settled={asked.current} />
      ) : null}
    </div>
  );
}
