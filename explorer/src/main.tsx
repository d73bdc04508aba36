import { render } from "preact";
import { App } from "./app";
import "./style/base.css";
import "./style/frame.css";
import "./style/tables.css";
import "./style/drawings.css";
import "./style/steps.css";
import "./style/cards.css";
import "./style/learn.css";
import "./style/next.css";
import "./style/text.css";
import "./style/heat.css";
import "./style/lens.css";
import "./style/compare.css";
import "./style/export.css";
import "./style/train.css";

const root = document.getElementById("app");
if (root) render(<App />, root);
