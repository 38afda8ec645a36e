//! Labels and fields of documents in the administration API.

use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::scene::Scene;

#[test]
fn a_label_is_set_compared_and_taken_away() {
    let scene = Scene::service().agent().start();
    let api = Api::of(&scene.about);
    let secret =
        json!({ "name": "labelled", "allowed_services": ["echo"], "managed_by": "git/one" });
    for (collection, new, id) in [
        (
            "/accounts",
            json!({ "id": "labelled", "managed_by": "git/one" }),
            "id",
        ),
        (
            "/accounts/demo/services",
            json!({ "id": "labelled", "managed_by": "git/one" }),
            "id",
        ),
        ("/accounts/demo/credentials", secret.clone(), "client_id"),
        ("/accounts/demo/service-keys", secret.clone(), "key_id"),
    ] {
        let created = api.ask("POST", collection, &new);
        assert_eq!(
            (created.status, &created.body["managed_by"]),
            (201, &json!("git/one"))
        );
        assert_eq!(api.ask("POST", collection, &new).status, 200);
        let mut other = new.clone();
        other["managed_by"] = "git/two".into();
        assert_eq!(
            api.ask("POST", collection, &other).status,
            409,
            "{collection}"
        );
        let mut silent = new.clone();
        silent.as_object_mut().unwrap().remove("managed_by");
        assert_eq!(api.ask("POST", collection, &silent).status, 200);

        let item = format!("{collection}/{}", created.body[id].as_str().unwrap());
        let refused = api.ask("PATCH", &item, &json!({ "managed_by": "two words" }));
        assert_eq!(
            (refused.status, &refused.body["field"]),
            (422, &json!("managed_by"))
        );
        let changed = api.ask("PATCH", &item, &json!({ "managed_by": "git/two" }));
        assert_eq!(changed.body["managed_by"], "git/two");
        assert_eq!(
            api.ask("PATCH", &item, &json!({})).body["managed_by"],
            "git/two"
        );
        let cleared = api.ask("PATCH", &item, &json!({ "managed_by": "" }));
        assert_eq!(
            (cleared.status, cleared.body.get("managed_by")),
            (200, None)
        );
        assert_eq!(api.get(&item).body.get("managed_by"), None::<&Value>);
    }
}

#[test]
fn fields_that_name_a_document_are_bounded_ascii() {
    let scene = Scene::service().agent().start();
    let send = |id: &str, field: &str, value: &[u8]| {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .build()
            .into();
        let request = http::Request::builder()
            .method("POST")
            .uri(format!("{}/api/v1/accounts", scene.about.admin_url))
            .header(
                "Authorization",
                format!("Bearer {}", scene.about.admin_token),
            )
            .header("Content-Type", "application/json")
            .header(field, http::HeaderValue::from_bytes(value).unwrap())
            .body(json!({ "id": id }).to_string())
            .unwrap();
        let mut response = agent.run(request).unwrap();
        let body = response.body_mut().read_to_string().unwrap();
        let body: Value = serde_json::from_str(&body).unwrap();
        (response.status().as_u16(), body)
    };
    for (field, longest) in [("X-Gw-Applied-File", 200), ("X-Gw-Applied-Revision", 100)] {
        for wrong in [
            &b""[..],
            b"a\tb",
            "a\u{fc}".as_bytes(),
            "x".repeat(longest + 1).as_bytes(),
        ] {
            let (status, problem) = send("refused", field, wrong);
            assert_eq!(
                (status, &problem["field"]),
                (422, &json!(field)),
                "{problem}"
            );
        }
        let id = format!("a{longest}");
        let (status, _) = send(&id, field, "x".repeat(longest).as_bytes());
        assert_eq!(status, 201);
    }
    let entries = Api::of(&scene.about).get("/audit-log?limit=1").body;
    let applied = &entries["items"][0]["detail"]["applied"];
    assert_eq!(*applied, json!({ "revision": "x".repeat(100) }));
}
