//! Labels and fields of documents in the administration API.

use serde_json::{Value, json};

use crate::support::scene::Scene;

#[test]
fn a_label_is_set_compared_and_taken_away() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let named = json!({ "id": "labelled", "managed_by": "git/one" });
    let secret =
        json!({ "name": "labelled", "allowed_services": ["echo"], "managed_by": "git/one" });
    for (collection, new, id) in [
        ("/accounts", &named, "id"),
        ("/accounts/demo/services", &named, "id"),
        ("/accounts/demo/credentials", &secret, "client_id"),
        ("/accounts/demo/service-keys", &secret, "key_id"),
    ] {
        let created = api.ask("POST", collection, new);
        assert_eq!(created.status, 201, "{collection}");
        assert_eq!(created.body["managed_by"], "git/one", "{collection}");
        let mut other = new.clone();
        other["managed_by"] = "git/two".into();
        let mut silent = new.clone();
        silent.as_object_mut().unwrap().remove("managed_by");
        for (again, status) in [(new, 200), (&other, 409), (&silent, 200)] {
            let reply = api.ask("POST", collection, again);
            assert_eq!(reply.status, status, "{collection}: {again}");
        }

        let item = format!("{collection}/{}", created.body[id].as_str().unwrap());
        let refused = api.ask("PATCH", &item, &json!({ "managed_by": "two words" }));
        assert_eq!(refused.status, 422, "{collection}");
        assert_eq!(refused.body["field"], "managed_by", "{collection}");
        for (changes, label) in [
            (json!({ "managed_by": "git/two" }), Some("git/two")),
            (json!({}), Some("git/two")),
            (json!({ "managed_by": "" }), None),
        ] {
            let changed = api.patch(&item, &changes);
            assert_eq!(changed["managed_by"].as_str(), label, "{collection}");
        }
        assert_eq!(api.get(&item).done().get("managed_by"), None);
    }
}

#[test]
fn fields_that_name_a_document_are_bounded_ascii() {
    let scene = Scene::service().agent().start();
    let token = format!("Bearer {}", scene.about.admin_token);
    let send = |id: &str, field: &str, value: &[u8]| {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .build()
            .into();
        let request = http::Request::builder()
            .method("POST")
            .uri(format!("{}/api/v1/accounts", scene.about.admin_url))
            .header("Authorization", &token)
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
            assert_eq!(status, 422, "{problem}");
            assert_eq!(problem["field"], field, "{problem}");
        }
        let id = format!("a{longest}");
        let (status, _) = send(&id, field, "x".repeat(longest).as_bytes());
        assert_eq!(status, 201);
    }
    let entries = scene.api().list("/audit-log?limit=1");
    let applied = &entries[0]["detail"]["applied"];
    assert_eq!(*applied, json!({ "revision": "x".repeat(100) }));
}
