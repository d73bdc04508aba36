// Make pictures as SVG or PNG, and save files.

import { picture } from "./picture";

// Characters that are not allowed in XML.
const NO_XML =
  /[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const [SCALE, MAX_PIXELS, MAX_SIDE] = [2, 1 << 27, 16_384]; // limits of a canvas in browsers

export function svgText(charts: readonly Element[], title: string, about: readonly string[] = []): string {
  return new XMLSerializer().serializeToString(picture(charts, title, about)).replace(NO_XML, "\ufffd");
}

/** The picture at twice its size, or smaller if that exceeds the limits of a canvas. */
export async function png(charts: readonly Element[], title: string, about: readonly string[] = []): Promise<Blob> {
  const image = new Image();
  // A data: address, because the content security policy does not allow blob: for images.
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(charts, title, about))}`;
  await image.decode();
  const { naturalWidth: width, naturalHeight: height } = image;
  const scale = Math.min(SCALE, MAX_SIDE / Math.max(width, height), Math.sqrt(MAX_PIXELS / (width * height)));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.floor(width * scale), Math.floor(height * scale)];
  canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, failed) =>
    canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("the picture is too large"))), "image/png"),
  );
}

export function save(name: string, content: string | Blob, type: string): void {
  const blob = typeof content === "string" ? new Blob([content], { type: `${type};charset=utf-8` }) : content;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the download may still be running
}
