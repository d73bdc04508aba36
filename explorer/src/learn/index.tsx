// The Learn page: one story in ten steps, each with the numbers that the one before left.

import type { JSX } from "preact";
import { useContext } from "preact/hooks";
import glossary from "../i18n/glossary.json";
import { Language, useStrings } from "../i18n";
import { Exports } from "../ui/export";
import { Chain } from "./chain";
import { Compare } from "./compare";
import { Draw } from "./draw";
import { learnDocument, learnLines, learnTables } from "./export";
import { Hidden } from "./hidden";
import { Linear } from "./linear";
import { Logits } from "./logits";
import { Loss } from "./loss";
import { Stable } from "./stable";
import { useLearn } from "./state";
import { Temperature } from "./temperature";
import { TreeStep } from "./tree";

const STEPS = [
  ["hidden", Hidden],
  ["linear", Linear],
  ["logits", Logits],
  ["stable", Stable],
  ["temperature", Temperature],
  ["chain", Chain],
  ["draw", Draw],
  ["loss", Loss],
  ["compare", Compare],
  ["tree", TreeStep],
] as const;

export function LearnPage(): JSX.Element {
  const learn = useLearn();
  const strings = useStrings();
  const lang = useContext(Language);
  return (
    <>
      <header class="intro">
        <p class="sentence">{strings.sentence}</p>
        <h1>{strings.intro.title}</h1>
        <p class="lead">{strings.intro.lead}</p>
        <p class="note">{strings.intro.how}</p>
      </header>
      <nav class="contents" aria-label={strings.frame.contents}>
        <ol>
          {STEPS.map(([id]) => (
            <li key={id}>
              <a href={`#${id}`}>{strings[id].title}</a>
            </li>
          ))}
        </ol>
      </nav>
      {STEPS.map(([id, StepView]) => (
        <StepView key={id} learn={learn} />
      ))}
      <Exports
        name="learn"
        title={strings.intro.title}
        document={() => learnDocument(learn, strings.words)}
        tables={() => learnTables(learn, strings)}
        charts="table.bars"
        lines={() => learnLines(learn)}
      />
      <section class="glossary" aria-labelledby="glossary-title">
        <h2 id="glossary-title">{strings.glossary.title}</h2>
        <dl>
          {glossary.map((entry) => (
            <div key={entry.en}>
              <dt>
                {entry[lang]}
                {lang === "zh" && entry.en !== entry.zh ? <small lang="en"> {entry.en}</small> : null}
              </dt>
              <dd>{entry.say[lang]}</dd>
            </div>
          ))}
        </dl>
      </section>
    </>
  );
}
