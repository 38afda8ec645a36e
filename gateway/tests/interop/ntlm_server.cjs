// Answers with method and user. express-ntlm authenticates each connection; it takes any password.
const http = require("node:http");
const express = require("express");
const ntlm = require("express-ntlm");

const application = express();
application.use(ntlm({ domain: "EXAMPLE" }));
application.use((request, response) => {
  response.send(`${request.method} ${request.ntlm.UserName}\n`);
});
const server = http.createServer(application);
server.listen(0, "127.0.0.1", () => console.log(`http://127.0.0.1:${server.address().port}`));
