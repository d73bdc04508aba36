// The Compare page: two models or two samplers, on one next token or on a text.

import type { JSX } from "preact";
import { useContext } from "preact/hooks";
import { useStrings } from "../i18n/strings";
import { Models } from "../models";
import { Choice, optionsOf } from "../ui/controls";
import { Alarm, Inline, Prose } from "../ui/prose";
import { PromptForm, useDraft } from "../ui/promptForm";
import { Status } from "../ui/requestStatus";
import { usePromptParam } from "../text/usePromptParam";
import { change, oneOf, useParam } from "../url";
import { TextResult } from "./textResult";
import { DifferentVocabularies } from "./differentVocabularies";
import type { Sides } from "./compareExport";
import { PromptResult } from "./promptResult";
import { ModelSide, SamplerSide } from "./sideControls";
import { useSampler } from "../sampler/useSampler";
import { INITIAL, libraryOptions, swapped } from "./sides";
import { useTextComparison, useRows } from "./useCompare";

export function ComparePage(): JSX.Element {
  const {
    comparing: s,
    text: { textUnavailable },
  } = useStrings();
  const models = useContext(Models);
  const known = models.map(({ name }) => name);
  const [first = "", second = first] = known;
  const [wanted, setWhat] = useParam(
    "what",
    oneOf(second === first ? "samplers" : "models", ["models", "samplers"] as const),
  );
  const what = known.length > 1 ? wanted : "samplers";
  const [where, setWhere] = useParam("where", oneOf("prompt", ["prompt", "text"] as const));
  const [model] = useParam("model", oneOf(first, known));
  const [a] = useParam("a", oneOf(model, known));
  const [b] = useParam("b", oneOf(second, known));
  const field = usePromptParam(models.find((model) => model.name === a));
  const draft = useDraft(field);
  const one = useSampler("a", INITIAL.a);
  const two = useSampler("b", INITIAL.b);
  const samplers = what === "samplers";
  const onText = where === "text";

  const other = samplers ? a : b;
  const rows = useRows(!onText && field.text !== undefined, a, other, field.text ?? "");
  const question = samplers
    ? { a, sampler_a: libraryOptions(one), sampler_b: libraryOptions(two), text: field.text }
    : { a, b, text: field.text };
  const textComparison = useTextComparison(onText && field.text !== undefined ? question : undefined);
  const request = onText ? textComparison : rows;
  const found = (request.error && !request.current) || field.text === undefined ? undefined : request.data;
  const [modelA, modelB] = [a, other].map((name) => models.find((model) => model.name === name));
  const sides: Sides | undefined = modelA &&
    modelB && { models: [modelA, modelB], samplers: samplers ? [one, two] : undefined };
  const swap = (): void => change(samplers ? swapped(one, two) : { a: b, b: a });

  return (
    <div class="compare">
      <header class="intro">
        <h1>{s.title}</h1>
        <Prose text={s.lead} />
      </header>
      <div class="settings-row">
        {known.length > 1 ? (
          <Choice
            name="what"
            label={s.what}
            value={what}
            options={optionsOf(s, "models", "samplers")}
            onChoose={setWhat}
          />
        ) : null}
        <Choice
          name="where"
          label={s.where}
          value={where}
          options={
            [
              ["prompt", s.onPrompt],
              ["text", s.onText],
            ] as const
          }
          onChoose={setWhere}
        />
        {samplers && known.length > 1 ? (
          <Choice
            name="model"
            label={s.model}
            value={a}
            options={known.map((name) => [name, name] as const)}
            onChoose={(name) => change({ a: name })}
          />
        ) : null}
      </div>
      <PromptForm
        name="prompt"
        label={onText ? s.text : s.prompt}
        button={s.go}
        rows={onText ? 4 : 2}
        draft={draft}
        onSubmit={(given) => {
          if (request.error && given === field.text) request.retry();
          else change({ ...field.to(given), at: null });
        }}
      />
      {known.length > 1 ? null : (
        <p class="note">
          <Inline text={s.one} />
        </p>
      )}
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
      {field.text === undefined ? <Alarm>{textUnavailable}</Alarm> : null}
      <Status request={request} waiting={s.waiting} />
      {found?.comparable === false ? <DifferentVocabularies different={found} /> : null}
      <div class={request.current && !draft.edited ? "" : "stale"}>
        {sides && found?.comparable && "rows" in found && found.models.join() === [a, other].join() ? (
          <PromptResult
            found={found}
            sides={sides}
            prompt={field.text ?? ""}
            settled={request.current && !request.loading}
          />
        ) : null}
        {sides && found?.comparable && "places" in found ? (
          <TextResult found={found} sides={sides} field={field} settled={request.current && !request.loading} />
        ) : null}
      </div>
    </div>
  );
}
