// Browsers start no worker from a file of the disk. There, the search runs in a hidden frame instead of a worker.
// Material's offline plugin would fetch such a script from another host; mkdocs.yml names this one in its place.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.document.open();  // otherwise Firefox loads an empty page into the frame later
      inside.document.write("<head></head>");
      inside.document.close();
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
      const script = inside.document.createElement("script");
      script.src = url;
      const loaded = new Promise(done => script.addEventListener("load", done));
      inside.document.head.append(script);
      this.postMessage = data => loaded.then(() => inside.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
